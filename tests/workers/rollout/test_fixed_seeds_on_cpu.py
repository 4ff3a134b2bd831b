"""Trees of fixed seeds are those that were grown before the policies shared one growth: token by token.

trees_of_fixed_seeds.json holds for each policy random settings and what they gave: trajectories, masks,
log-probabilities, and for each token the segment that it is in. Segments are compared by the trajectories that share
them: one that goes on without a fork may be cut.
"""

import asyncio
import json
from pathlib import Path

import pytest

from tests.workers.rollout.toy_engine import EOS, VOCAB, HashEngine, Letters
from tests.workers.rollout.trees.arpo.toy_agent import TOKENIZER, ToyPolicy, encode, library_tools
from verl.workers.rollout.tree_builder import Sampling, grow
from verl.workers.rollout.trees.arpo.config import ARPOConfig
from verl.workers.rollout.trees.arpo.policy import Policy as ARPO
from verl.workers.rollout.trees.hato.config import HATOConfig
from verl.workers.rollout.trees.hato.local_reward import heuristic
from verl.workers.rollout.trees.hato.policy import Policy as HATO
from verl.workers.rollout.trees.hato.step_features import FEATURES
from verl.workers.rollout.trees.hato.value_model import value_model_of
from verl.workers.rollout.trees.latr import KTConfig
from verl.workers.rollout.trees.latr import Policy as LATR

CASES = json.loads(Path(__file__).with_name("trees_of_fixed_seeds.json").read_text())


def sharing(rows):
    """For each token the trajectories that share it."""
    of = {}
    for number, row in enumerate(rows):
        for i in row:
            of.setdefault(i, set()).add(number)
    return [[sorted(of[i]) for i in row] for row in rows]


def look(tree, metrics):
    metrics = {name: round(value, 6) for name, value in tree.metrics.items() if name in metrics}
    log_probs = [[round(p, 6) for p in row] for row in tree.log_probs()]
    found = {"trajectories": tree.trajectories(), "masks": tree.response_masks(), "log_probs": log_probs}
    return found | {"segments": sharing(tree.segment_ids()), "metrics": metrics}


def same(tree, expected):
    assert look(tree, expected["metrics"]) == expected | {"segments": sharing(expected["segments"])}


@pytest.mark.parametrize("case", CASES["latr"], ids=lambda case: str(case["seed"]))
def test_latr(case):
    policy = LATR(KTConfig(**case["config"]), lambda token: Letters().decode([token]))
    tree = grow(
        HashEngine(case["sharpness"]),
        case["prompt"],
        case["n"],
        policy,
        max_tokens=case["room"],
        stop_token_ids=[EOS],
        sampling=Sampling(case["temperature"]),
        seed=case["seed"],
    )
    case["tree"]["metrics"].pop("tree_tokens_generated", None)  # with those that nobody reads: not the tree's
    same(asyncio.run(tree), case["tree"])


@pytest.mark.parametrize("case", CASES["arpo"], ids=lambda case: str(case["seed"]))
def test_arpo(case):
    config = dict(case["config"])
    limits = {name: config.pop(name) for name in ("call_limit", "max_result_tokens")}
    tree = grow(
        ToyPolicy(calls=case["calls"]),
        encode("<|im_start|>user\nwho?<|im_end|>\n<|im_start|>assistant\n"),
        case["n"],
        ARPO(ARPOConfig(**config), TOKENIZER.decode),
        environment=library_tools(**limits),
        max_tokens=case["room"],
        stop_token_ids=[TOKENIZER.eos_token_id],
        vocab_size=len(TOKENIZER),
        seed=case["seed"],
    )
    same(asyncio.run(tree), case["tree"])


class WithoutLocalReward:
    """A value model as it was when the trees were grown: it did not see the local reward, which is the last feature."""

    def __init__(self, config: HATOConfig):
        self.model = value_model_of(config, 0, len(FEATURES) - 1)

    def predict(self, features):
        return self.model.predict([row[:-1] for row in features])


@pytest.mark.parametrize("case", CASES["hato"], ids=lambda case: str(case["seed"]))
def test_hato(case):
    config = HATOConfig.from_dict(case["config"])
    policy = HATO(config, WithoutLocalReward(config), heuristic, Letters().decode)
    tree = asyncio.run(
        grow(
            HashEngine(3.0),
            case["prompt"],
            case["n"],
            policy,
            max_tokens=case["room"],
            stop_token_ids=[EOS],
            vocab_size=VOCAB,
            seed=case["seed"],
        )
    )
    same(tree, case["tree"])
    steps = policy.about_tree(tree)["hato_steps"]
    made = [
        {
            "value": round(value, 6),
            "count": tree.segments[i].info["count"],
            "local_reward": round(tree.segments[i].info["local_reward"], 6),
            "features": [round(feature, 6) for feature in features[:-1]],
            "path": [token for j in tree.path(i) for token in tree.segments[j].token_ids],
        }
        for i, features, value in zip(steps["segments"], steps["features"], steps["values"], strict=True)
    ]
    assert sorted(made, key=lambda step: step["path"]) == sorted(case["steps"], key=lambda step: step["path"])
