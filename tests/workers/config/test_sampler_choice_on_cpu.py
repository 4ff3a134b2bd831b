"""Runs name HAPO's logits processor, which makes vLLM use its V1 model runner; and where requests carry seeds."""

import asyncio
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from tests.configs import composed
from verl.trainer.checks.run_plan import describe_plan
from verl.workers.config.sampler_choice import (
    ENGINE,
    PROCESSORS,
    SEEDS,
    bound_scores,
    choose_sampler,
    choose_seeds,
    describe_sampler,
)
from verl.workers.rollout.engines.interface import GenerationRequest
from verl.workers.rollout.engines.vllm_server import LLMClientEngine
from vllm_patches.tempered_requests import PROCESSOR


@pytest.fixture(autouse=True)
def no_choice_of_the_user(monkeypatch):
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)


def chosen(*overrides, recipe="sampler=tempered", hardware="gpu"):
    """Return the logits processors of a run, and the text of its plan about the sampler."""
    config = composed("explore", f"hardware={hardware}", recipe, *overrides)
    choose_sampler(config)
    return list(OmegaConf.select(config, PROCESSORS) or []), describe_sampler(config)


@pytest.mark.parametrize("hardware", ["cpu", "gpu"])
def test_an_adaptive_temperature_names_the_processor(hardware):
    named, text = chosen(hardware=hardware)
    assert named == [PROCESSOR] and text.startswith("adaptive temperature (tau 0.05)")
    assert chosen(f"+{PROCESSORS}=[mine]", hardware=hardware)[0] == ["mine", PROCESSOR]
    assert chosen(f"+{PROCESSORS}=['{PROCESSOR}']", hardware=hardware)[0] == [PROCESSOR]


def test_the_v2_runner_cannot_be_forced(monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    assert chosen()[0] == [PROCESSOR]
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    assert chosen(recipe="sampler=plain")[0] == []
    with pytest.raises(ValueError, match="unset that variable"):
        chosen()


def test_an_ordinary_temperature_needs_none():
    processors, text = chosen(recipe="sampler=plain")
    assert processors == [] and text.startswith("temperature 1.0")
    assert "\nsampler:  temperature 1.0" in describe_plan(composed("explore", "hardware=cpu"))


@pytest.mark.parametrize(("credit", "bound"), [("igpo", 1024), ("grpo", None)])
def test_few_tokens_are_scored_at_once(credit, bound):
    config = composed("explore", "hardware=gpu", f"credit={credit}", "actor_rollout_ref.rollout.max_model_len=4096")
    bound_scores(config)
    assert OmegaConf.select(config, f"{ENGINE}.long_prefill_token_threshold") == bound


@pytest.mark.parametrize("recipe", ["grpo_trainer", "explore"])
@pytest.mark.parametrize(
    ("overrides", "sent"),
    [
        (["hardware=cpu"], True),
        (["hardware=gpu"], False),
        (["hardware=gpu", f"+{SEEDS}=true"], True),
        (["hardware=gpu", "actor_rollout_ref.rollout.full_determinism=true"], True),
    ],
)
def test_requests_carry_seeds_on_the_cpu_or_if_the_config_says_so(recipe, overrides, sent):
    config = composed(recipe, *overrides)
    choose_seeds(config)
    assert OmegaConf.select(config, SEEDS) == sent
    assert describe_sampler(config).endswith("a seed for each request" if sent else "no seeds")


@pytest.mark.parametrize("sent", [False, True])
def test_the_engine_sends_them_or_not(sent):
    asked = []

    async def generate(group, prompt_ids, params):
        asked.append(params)
        return SimpleNamespace(token_ids=[1, 2], log_probs=[-1.0, -1.0], stop_reason="completed", extra_fields={})

    engine = LLMClientEngine(SimpleNamespace(), str, seeds=sent)
    engine.servers = SimpleNamespace(send=generate, release=lambda group: None)
    asyncio.run(engine.generate(GenerationRequest([5], max_tokens=2, stop_token_ids=[9], seed=7)))
    assert [params.get("seed") for params in asked] == ([7] if sent else [None])
