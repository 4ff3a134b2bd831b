"""scripts/check_vllm_names.py: both versions of vLLM have what this project uses, and what they lack is named."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.packages import GPU_VLLM, unpacked
from tests.scripts.loading import load_script

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "check_vllm_names.py"
# file -> (text that fits vLLM, text that does not, where the checker sees it, what it says)
BREAKS = {
    "vllm_patches/v1_adaptive_temperature.py": [
        ("import VllmConfig", "import GoneConfig", '"GoneConfig" is unknown import symbol'),
        (
            "class AdaptiveTemperature(LogitsProcessor):",
            "import vllm.gone\nclass A:",
            'Import "vllm.gone"',
        ),
    ],
    "vllm_patches/cpu_seeded_requests.py": [
        ("TopKTopPSampler.forward_native", "TopKTopPSampler.forward_gone", 'attribute "forward_gone"'),
    ],
    "verl/workers/rollout/engines/local_vllm.py": [
        ("seed=request.seed", "sown=request.seed", 'No parameter named "sown"'),
    ],
    "scripts/vllm_names.py": [
        ("flat.start_indices", "flat.start_gone", 'attribute "start_gone"'),
        ("aggregate=True", "added=True", 'No parameter named "added"'),
        (
            "def add_request(self, req_idx, sampling_params)",
            "def add_request(self, req_idx)",
            "count mismatch",
        ),
        (
            "def _validate_params(self, params, supp",
            "def _validate_params(self, values, supp",
            "2 name mismatch",
        ),
        ("def apply_staged_writes", "def apply_gone", 'Method "apply_gone" is marked as override, but no base method'),
    ],
    "scripts/serve.sh": [("--block-size", "--gone-size", 'attribute "gone_size"')],
    "recipe/common/config/hardware/cpu.yaml": [("block_size", "block_gone", 'attribute "block_gone"')],
    "recipe/common/run_math.sh": [("vllm.hf_overrides", "vllm.gone_overrides", 'attribute "gone_overrides"')],
}


@pytest.fixture(scope="module")
def script():
    return load_script("check_vllm_names")


def test_engine_arguments_in_yaml(script):
    config = {"a": {"engine_kwargs": {"vllm": {"x": 1, "y": {"z": 2}}, "sglang": {"w": 1}}, "b": None}}
    assert list(script.engine_arguments(config)) == ["x", "y"]


@pytest.mark.slow
def test_the_installed_build(script):
    assert script.check(script.folder_of("vllm")) == []


@pytest.mark.slow
def test_a_wheel_of_the_gpu_extras_version(tmp_path):
    sources, wheel = unpacked(GPU_VLLM, "*.py"), tmp_path / "vllm.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for file in sources.rglob("*.py"):
            archive.write(file, file.relative_to(sources))
    done = subprocess.run([sys.executable, SCRIPT, wheel], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    version = re.escape(GPU_VLLM.partition("==")[2])
    assert re.fullmatch(rf"vLLM {version} \(.+\): \d+ modules, 0 misfits\n", done.stdout)


@pytest.mark.slow
def test_each_misfit_is_named_with_its_file_and_line(script, tmp_path):
    expected = []
    for file, breaks in BREAKS.items():
        text = (ROOT / file).read_text()
        for fitting, misfit, _ in breaks:
            assert fitting in text, f"{file} has no {fitting!r} any more"
            text = text.replace(fitting, misfit)
        for _, misfit, message in breaks:
            places = [i for i, line in enumerate(text.splitlines(), 1) if misfit.splitlines()[0] in line]
            expected += [(file if file.endswith(("sh", "yaml")) else f"{file}:{place}", message) for place in places]
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    lines = script.check(script.folder_of("vllm"), tmp_path)
    missed = [(place, message) for place, message in expected if not any(place in x and message in x for x in lines)]
    assert missed == []
    assert {line.partition(": ")[0] for line in lines} == {place for place, _ in expected}


def test_sources_without_vllm(tmp_path):
    done = subprocess.run([sys.executable, SCRIPT, tmp_path], capture_output=True, text=True)
    assert done.returncode == 1
    assert f"error: {tmp_path}: neither a wheel of vLLM nor a folder that holds vllm/" in done.stderr
