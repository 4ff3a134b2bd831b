"""Requests carry seeds where these make runs reproducible, or cost nothing."""

import asyncio
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from tests.configs import composed
from verl.workers.config import sampler_choice
from verl.workers.config.sampler_choice import SEEDS, choose_sampler, choose_seeds, describe_sampler
from verl.workers.rollout.engines.interface import GenerationRequest
from verl.workers.rollout.engines.vllm_server import LLMClientEngine

ROLLOUT = "actor_rollout_ref.rollout"
QWEN = {"architectures": ["Qwen2ForCausalLM"]}


def seeds(monkeypatch, recipe, *overrides, v2=False):
    monkeypatch.setattr(sampler_choice, "takes_v2_runner", lambda config, model: v2)
    config = composed(recipe, *overrides)
    choose_sampler(config, QWEN)
    choose_seeds(config, QWEN)
    assert describe_sampler(config).endswith(
        "a seed for each request" if OmegaConf.select(config, SEEDS) else "no seeds"
    )
    return OmegaConf.select(config, SEEDS)


@pytest.mark.parametrize("recipe", ["grpo_trainer", "explore"])
def test_where_requests_carry_seeds(monkeypatch, recipe):
    assert seeds(monkeypatch, recipe, "hardware=cpu")
    assert not seeds(monkeypatch, recipe, "hardware=gpu")
    assert seeds(monkeypatch, recipe, "hardware=gpu", v2=True)
    tempered = ["explore", "hardware=gpu", "sampler=tempered"]
    assert seeds(monkeypatch, *tempered, v2=True) and not seeds(monkeypatch, *tempered), (
        "a processor keeps the V1 runner"
    )
    assert seeds(monkeypatch, recipe, "hardware=gpu", f"+{SEEDS}=true")
    assert seeds(monkeypatch, recipe, "hardware=gpu", f"{ROLLOUT}.full_determinism=true")


@pytest.mark.parametrize("sent", [False, True])
def test_the_engine_sends_them_or_not(sent):
    asked = []

    async def generate(group, prompt_ids, params):
        asked.append(params)
        return SimpleNamespace(token_ids=[1, 2], log_probs=[-1.0, -1.0], stop_reason="completed", extra_fields={})

    engine = LLMClientEngine(SimpleNamespace(), seeds=sent)
    engine.servers = SimpleNamespace(generate=generate, release=lambda group: None)
    asyncio.run(engine.generate(GenerationRequest([5], max_tokens=2, stop_token_ids=[9], seed=7)))
    assert [params.get("seed") for params in asked] == ([7] if sent else [None])
