"""What the rollout gives and takes around its trees, on a tiny model in process; the stack is in tests/e2e."""

import asyncio
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from transformers import Qwen2Config, Qwen2ForCausalLM

from recipe.common.tiny_model import make_tokenizer
from verl.workers.rollout.hato_rollout import HATORollout
from verl.workers.rollout.rollout_engine import TransformersEngine
from verl.workers.rollout.trajectory_tree import TREE, TREE_METRICS, TrajectoryTree
from verl.workers.rollout.trees.hato.config import HATOConfig
from verl.workers.rollout.trees.hato.messages import LEAF, MAX_NODES, SETTINGS, TREE_STATE, pack
from verl.workers.rollout.trees.hato.step_features import FEATURES
from verl.workers.rollout.trees.hato.tree import ReasoningTree
from verl.workers.rollout.trees.hato.value_model import value_model_of

N = 6


class Scorer:
    """Upstream's `_compute_score`: right when the response has an even number of tokens."""

    def __init__(self):
        self.asked = []

    async def __call__(self, outputs, kwargs):
        (output,) = outputs
        self.asked.append((tuple(output.response_ids), kwargs))
        output.reward_score = float(len(output.response_ids) % 2 == 0)
        output.extra_fields["reward_extra_info"] = {"acc": output.reward_score}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config = Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=2, initializer_range=1.0)
    return Qwen2ForCausalLM(config).eval(), tokenizer


def rollout_of(model, hato: dict, scorer: Scorer | None) -> HATORollout:
    lm, tokenizer = model
    config = {"seed": 1, "max_model_len": None, "prompt_length": 8, "response_length": 12, "n": N}
    config = OmegaConf.create(
        {"actor_rollout_ref": {"rollout": config}, "hato": hato, "trainer": {"tree_freq": 2}, "data": {}}
    )

    async def initial_tokens(messages):
        return tokenizer.encode(messages[0]["content"])

    agent_loop = SimpleNamespace(ct_build_initial_tokens=initial_tokens)
    rollout = HATORollout(config, agent_loop, TransformersEngine(lm, tokenizer), tokenizer)
    rollout.compute_score = scorer
    return rollout


HATO = {"tree": {"max_step_tokens": 3, "max_depth": 3}, "exploration": {"initial_temperature": 0.5}}
SAMPLING = {"temperature": 0.5, "top_p": 1.0, "top_k": -1}


def run(rollout, step=2, **prompt):
    prompt = {"uid": "u", "global_steps": step, "index": 0, "raw_prompt": [{"role": "user", "content": "1+2"}]} | prompt
    return asyncio.run(rollout.run(prompt, N, dict(SAMPLING))), prompt


def test_rows_tree_and_verification(model):
    scorer = Scorer()
    outputs, _ = run(rollout_of(model, HATO, scorer))
    assert len(outputs) == N
    state = outputs[0].extra_fields[TREE_STATE]
    tree = ReasoningTree.from_structure(state["structure"])
    leaves = [output.extra_fields[LEAF] for output in outputs]
    assert set(leaves) == set(tree.leaves())
    for output in outputs:
        path = tree.path(output.extra_fields[LEAF])
        assert sum(tree.nodes[node].n_tokens for node in path) == len(output.response_ids)
        assert output.reward_score == float(len(output.response_ids) % 2 == 0)
        assert output.extra_fields["reward_extra_info"] == {"acc": output.reward_score}
    assert len(scorer.asked) == len(set(leaves)), "a leaf is verified once"
    assert len(state["features"]) == len(tree.nodes) and len(state["features"][1]) == len(FEATURES)
    trained = sum(sum(output.response_mask) for output in outputs)
    assert trained == sum(node.n_tokens for node in tree.nodes), "every token once"
    assert outputs[0].extra_fields[TREE_METRICS]["nodes_kept"] == tree.n_kept
    shown = TrajectoryTree.from_json(outputs[0].extra_fields[TREE])
    assert shown.trajectories() == [output.response_ids for output in outputs]
    assert all(TREE_STATE not in output.extra_fields for output in outputs[1:])


def test_settings_are_used_and_do_not_travel_on(model):
    config = HATOConfig.from_dict(HATO)
    taught = value_model_of(config, 1)
    taught.observe([[0.5] * len(FEATURES)] * 64, [1.0] * 64)
    rollout = rollout_of(model, HATO, Scorer())
    settings = {"step": 2, "temperature": 0.9, "value_model": pack(taught.state_dict())}
    outputs, prompt = run(rollout, **{SETTINGS: settings, MAX_NODES: torch.tensor(4)})
    assert SETTINGS not in prompt and MAX_NODES not in prompt
    assert outputs[0].extra_fields[TREE_METRICS]["nodes_kept"] <= 4
    probe = [[0.5] * len(FEATURES)]
    assert rollout.value_model.predict(probe)[0] == taught.predict(probe)[0]
    assert rollout.learnt_until == 2
    other, _ = run(rollout_of(model, HATO, Scorer()))
    assert [o.response_ids for o in other] != [o.response_ids for o in outputs], "another temperature"


def test_without_rewards_during_the_rollout_none_are_set(model):
    outputs, _ = run(rollout_of(model, HATO, None))
    assert all(output.reward_score is None for output in outputs)


def test_the_reward_loop_scores_steps(model):
    scorer = Scorer()
    rollout = rollout_of(model, HATO | {"local_reward": "reward_loop"}, scorer)
    outputs, _ = run(rollout, extra_info={"split": "train"})
    steps = [kwargs["extra_info"] for _, kwargs in scorer.asked if "hato_step" in kwargs.get("extra_info", {})]
    assert steps and all(info["split"] == "train" and set(info["hato_step"]) == {"before", "step"} for info in steps)
    tree = ReasoningTree.from_structure(outputs[0].extra_fields[TREE_STATE]["structure"])
    for number, node in enumerate(tree.nodes[1:], start=1):
        before = sum(tree.nodes[step].n_tokens for step in tree.path(number))
        assert node.local_reward == float(before % 2 == 0)
    with pytest.raises(ValueError, match="needs rewards that are computed during the rollout"):
        run(rollout_of(model, HATO | {"local_reward": "reward_loop"}, None))


def test_the_same_prompt_gives_the_same_tree_and_another_step_another(model):
    def tokens(step):
        return [output.response_ids for output in run(rollout_of(model, HATO, Scorer()), step)[0]]

    assert tokens(1) == tokens(1) != tokens(2)
