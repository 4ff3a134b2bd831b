"""Faulty reward functions in upstream's reward worker, which must go on."""

import asyncio
import re

import pytest
import torch
from omegaconf import OmegaConf
from verl.experimental.reward_loop.reward_loop import RewardLoopWorker
from verl.protocol import DataProto

from recipe.common.tiny_model import make_tokenizer
from verl_patches import guarded_rewards

REWARDS = """
import sys
from math import inf, nan

REWARD = {reward}

def now(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return sys.exit(2) if ground_truth == "exit" else REWARD if ground_truth == "faulty" else 1

async def later(**kwargs):
    return now(**kwargs)
"""
MANAGER = {"path": "pkg://verl.experimental.reward_loop.reward_manager.length_aware"}


@pytest.fixture
def score(tmp_path):
    """Returns the reward of a row with this truth; `faulty` has the test's reward."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    make_tokenizer().save_pretrained(tmp_path)
    workers = {}

    def compute(truth: str, name: str, reward: str = "1"):
        if not workers:
            (tmp_path / "rewards.py").write_text(REWARDS.format(reward=reward))
            function = {"path": str(tmp_path / "rewards.py"), "name": name, "reward_kwargs": {}}
            manager = {"source": "importlib", "name": "LengthAwareRewardManager", "module": MANAGER}
            kwargs = {"max_resp_len": 8, "overlong_buffer_cfg": None}
            settings = {"custom_reward_function": function, "reward_manager": manager, "reward_kwargs": kwargs}
            reward_config = settings | {"reward_model": {"enable": False}, "sandbox_fusion": {"url": None}}
            model = {"tokenizer_path": None, "path": str(tmp_path)}
            config = {"reward": reward_config, "actor_rollout_ref": {"model": model}, "data": {}}
            workers[0] = RewardLoopWorker(OmegaConf.create(config))
        row = {"prompts": [[3, 4]], "responses": [[5, 6]], "input_ids": [[3, 4, 5, 6]], "attention_mask": [[1] * 4]}
        other = {"data_source": ["mine"], "reward_model": [{"ground_truth": truth}], "extra_info": [{}]}
        data = DataProto.from_dict({name: torch.tensor(values) for name, values in row.items()}, other)
        return loop.run_until_complete(workers[0].compute_score_batch(data))[0]["reward_score"]

    yield compute
    asyncio.set_event_loop(None)
    loop.close()


@pytest.mark.parametrize("name", ["now", "later"])
def test_an_exit_is_an_error_and_the_worker_goes_on(score, name):
    with pytest.raises(RuntimeError, match="the reward function raised SystemExit"):
        score("exit", name)
    assert score("fine", name) == 1.0


@pytest.mark.parametrize("name", ["now", "later"])
@pytest.mark.parametrize("reward", ["nan", "inf", "None", "'1.0'", "{'score': nan, 'acc': 1}"])
def test_a_reward_that_is_no_finite_number_is_named(score, name, reward):
    value = eval(reward, {"nan": float("nan"), "inf": float("inf")})
    value = value.get("score") if isinstance(value, dict) else value
    expected = f"the reward of a row with data_source=mine is {value!r}, expected a finite number"
    with pytest.raises(ValueError, match=re.escape(expected)):
        score("faulty", name, reward)
    assert score("fine", name) == 1.0


def test_a_dictionary_is_a_reward(score):
    assert score("faulty", "now", "{'score': 0.5, 'acc': 1}") == 0.5


@pytest.mark.parametrize("acc", ["nan", "None", "'yes'", "[1]"])
def test_an_accuracy_that_is_no_number_ends_the_run(score, monkeypatch, acc):
    reports: list[str] = []
    monkeypatch.setattr(guarded_rewards, "report_fault", reports.append)
    with pytest.raises(ValueError, match="the reward function's acc is .*, expected"):
        score("faulty", "now", f"{{'score': 0.5, 'acc': {acc}}}")
    assert len(reports) == 1 and "expected a finite number" in reports[0]
