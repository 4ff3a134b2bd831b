"""Which of vLLM's model runners each recipe gets on a GPU: the V2 runner knows no logits processors, so that HAPO's
engines must fall back to V1, with a warning; an engine that fell back without need would be slower, and one that did
not would sample HAPO's rollouts at an ordinary temperature.

vLLM 0.30 takes V2 for every model; 0.24 for a list of architectures that has Qwen3 and Llama, but not Qwen2.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.configs import composed
from tests.fresh import python_of
from tests.packages import GPU_VLLM, unpacked
from vllm_patches import cpu_version_name

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = {
    "grpo": "common/config/grpo_trainer",
    "hapo": "hapo/config/hapo_math_trainer",
    "latr": "latr/config/grpo_math_trainer",
    "arpo": "arpo/config/arpo_trainer",
    "hato": "hato/config/hato_math_trainer",
}
ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}
WARNING = "Model Runner V2 does not yet support custom logits processors; using the V1 model runner instead."


def serve_arguments(config: str) -> list[str]:
    """What upstream's server makes of a recipe's rollout section, as far as it may bear on the runner."""
    cpu_version_name.install()
    from verl.workers.rollout.vllm_rollout.utils import build_cli_args_from_config

    recipe, _, name = config.split("/")
    rollout = composed(name, "hardware=gpu", recipe=recipe).actor_rollout_ref.rollout
    same = ("max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill", "enable_prefix_caching")
    same += ("logprobs_mode", "enforce_eager", "gpu_memory_utilization", "scheduling_policy")
    arguments = {key: rollout[key] for key in same} | {"tensor_parallel_size": rollout.tensor_model_parallel_size}
    arguments |= {"enable_sleep_mode": True, "distributed_executor_backend": "mp"}
    arguments |= {"compilation_config": {"cudagraph_mode": "FULL_AND_PIECEWISE"}}
    arguments |= OmegaConf.to_container((rollout.engine_kwargs or {}).get("vllm") or OmegaConf.create())
    return build_cli_args_from_config(arguments)


@pytest.fixture(scope="module")
def cases() -> dict[tuple[str, str], dict]:
    arguments = {recipe: serve_arguments(config) for recipe, config in CONFIGS.items()}
    return {
        (recipe, model_type): {"architecture": architecture, "model_type": model_type, "arguments": arguments[recipe]}
        for recipe in CONFIGS
        for model_type, architecture in ARCHITECTURES.items()
    }


@pytest.mark.parametrize("vllm", ["installed", GPU_VLLM])
def test_the_runner_of_every_recipe(cases, vllm):
    path = [*([unpacked(GPU_VLLM, "*.py")] if vllm == GPU_VLLM else []), ROOT]
    done = subprocess.run(
        python_of(Path(__file__).with_name("model_runner.py")),
        input=json.dumps(list(cases.values())),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    choices = dict(zip(cases, json.loads(done.stdout.splitlines()[-1]), strict=True))
    listed = ARCHITECTURES if vllm == "installed" else ("qwen3", "llama")
    assert {case: choice["v2"] for case, choice in choices.items()} == {
        (recipe, model_type): recipe != "hapo" and model_type in listed for recipe, model_type in cases
    }
    assert done.stdout.count(WARNING) == 1
    # both runners prepare a step while the GPU computes the one before
    assert all(choice["asynchronous"] for choice in choices.values())
