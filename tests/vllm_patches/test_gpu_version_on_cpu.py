"""Tests of our patches of vLLM and of our rollout server, with the version of vLLM that the GPU extra installs.

Its Python files run here without its kernels: the tests listed below need no engine, and pass with both versions.
"""

import os
from pathlib import Path

import pytest

from tests.fresh import output_of, python_for
from tests.packages import GPU_VLLM, unpacked

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
TESTS = [
    "tests/verl_patches/test_upstream_code_on_cpu.py::test_a_definition_still_has_the_code",
    "tests/vllm_patches/test_v1_adaptive_temperature_on_cpu.py",
    "tests/vllm_patches/test_top_logprobs_without_text_on_cpu.py",
    "tests/workers/rollout/engines/test_aborts_on_cpu.py",
    "tests/workers/rollout/engines/test_top_logprobs_server_on_cpu.py",
]
WITH_AN_ENGINE = "test_sampled_frequencies_follow or test_tau_zero_and_greedy"
NEWER = "get_rename_mapper"  # `cpu_adapter_names` has nothing to do with vLLM 0.24
CODE = """
import sys
from vllm_patches import cpu_version_name
cpu_version_name.install()
import pytest, vllm
assert vllm.__version__ == sys.argv[1], vllm.__file__
sys.exit(pytest.main(sys.argv[2:]))
"""


def test_patches_and_server():
    path = os.pathsep.join(map(str, (unpacked(GPU_VLLM, "*.py"), ROOT)))
    arguments = [*TESTS, "-k", f"not ({WITH_AN_ENGINE} or {NEWER})", "-p", "no:cacheprovider"]
    command = [*python_for(CODE), GPU_VLLM.partition("==")[2], *arguments]
    output_of(command, {**os.environ, "PYTHONPATH": path}, cwd=ROOT)
