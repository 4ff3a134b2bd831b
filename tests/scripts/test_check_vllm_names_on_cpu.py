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
BREAKS = [line.split(" | ") for line in Path(__file__).with_name("vllm_misfits.txt").read_text().splitlines()[1:]]


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
    expected, texts = [], {}
    for file, fitting, misfit, _ in BREAKS:
        text = texts.setdefault(file, (ROOT / file).read_text())
        assert fitting in text, f"{file} has no {fitting!r} any more"
        texts[file] = text.replace(fitting, misfit.replace("\\n", "\n"))
    for file, _, misfit, message in BREAKS:
        numbered = enumerate(texts[file].splitlines(), 1)
        places = [i for i, line in numbered if misfit.partition("\\n")[0] in line]
        expected += [(file if file.endswith(("sh", "yaml")) else f"{file}:{place}", message) for place in places]
    for file, text in texts.items():
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
