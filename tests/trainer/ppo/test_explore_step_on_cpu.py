"""ARPO's training step from the rollout's fields to the worker's: upstream's own step on a TransferQueue in memory."""

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from verl.trainer.ppo.aepo_algos import STANDARDISED_ENTROPY
from verl.trainer.ppo.v1.components import BalancedEntropy, components_of
from verl.trainer.ppo.v1.explore_trainer import ExploreTrainer, pad_segment_ids
from verl.workers.utils import field_losses

# two prompts; key -> reward, mask, entropies, segments. The last row is one that upstream adds to fill the batch up.
ROWS = {
    "q_1_0": (0.0, [1, 1, 0, 1], [1.0, 2.0, 9.0, 1.0], [0, 0, 5, 2]),
    "p_0_0": (1.0, [1, 1, 1], [1.0, 1.0, 4.0], [0, 1, 1]),
    "q_0_0": (1.0, [1, 1, 0, 1, 1], [1.0, 2.0, 9.0, 3.0, 3.0], [0, 0, 5, 1, 1]),
    "p_1_0": (0.0, [1], [2.0], [2]),
    "pad_0_0": (0.0, [0], [7.0], [0, 0, 5, 2]),
}


class MemoryQueue:
    """What the step needs of `transfer_queue`'s key-value interface."""

    def __init__(self):
        self.rows = {}
        for key, (reward, mask, entropy, segments) in ROWS.items():
            scores = torch.zeros(len(mask))
            scores[-1] = reward
            zeros = torch.zeros(len(mask))
            row = {"response_mask": torch.tensor(mask), "entropy": torch.tensor(entropy), "rm_scores": scores}
            row |= {"prompts": torch.tensor([3]), "responses": torch.arange(len(mask)), "old_log_probs": zeros}
            row |= {"uid": key[0] if key != "pad_0_0" else "pad", "extra_fields": {"segment_ids": segments}}
            self.rows[key] = row

    def batch(self) -> KVBatchMeta:
        tags = [{"is_padding": True} if key.startswith("pad") else {} for key in self.rows]
        return KVBatchMeta(keys=list(self.rows), tags=tags, partition_id="train")

    def kv_batch_get(self, keys, partition_id, select_fields):
        fields = [name for name in select_fields if name in self.rows[keys[0]]]
        data = {name: [self.rows[key][name] for key in keys] for name in fields}
        nested = {
            name: torch.nested.as_nested_tensor(column, layout=torch.jagged)
            for name, column in data.items()
            if isinstance(column[0], torch.Tensor)
        }
        others = [{name: data[name][i] for name in fields if name not in nested} for i in range(len(keys))]
        found = list_of_dict_to_tensordict(others)
        for name, column in nested.items():
            found[name] = column
        return found

    def kv_batch_put(self, keys, partition_id, fields):
        for name, column in fields.items():
            for key, value in zip(keys, column.unbind(), strict=True):
                self.rows[key][name] = value
        return self.batch()


@pytest.fixture
def queue(monkeypatch):
    queue = MemoryQueue()
    monkeypatch.setattr("transfer_queue.kv_batch_get", queue.kv_batch_get)
    monkeypatch.setattr("transfer_queue.kv_batch_put", queue.kv_batch_put)
    return queue


def trainer(adv_estimator: str = "grpo", *components: type) -> ExploreTrainer:
    made = ExploreTrainer.__new__(ExploreTrainer)
    made.config = OmegaConf.create(
        {
            "algorithm": {
                "adv_estimator": adv_estimator,
                "norm_adv_by_std_in_grpo": False,
                "gamma": 1.0,
                "lam": 1.0,
                "use_kl_in_reward": False,
            },
            "actor_rollout_ref": {"rollout": {"n": 2, "calculate_log_probs": False}},
            "trainer": {"tree_freq": -1},
        }
    )
    made.components, made.global_steps = [component(made.config) for component in components], 1
    made.submitted = {"q": 0, "p": 1}
    return made


def advantages(queue) -> dict[str, list[float]]:
    return {key: row["advantages"].tolist() for key, row in queue.rows.items()}


SOFT = {
    "q_1_0": [-0.5, -0.5, 0.0, -0.5],
    "p_0_0": [0.5, 0.5, 0.5],
    "q_0_0": [0.5, 0.5, 0.0, 0.5, 0.5],
    "p_1_0": [-0.5],
    "pad_0_0": [0.0],
}
# the first two tokens of q's trajectories are one segment, p's share none
HARD = SOFT | {"q_1_0": [0.0, 0.0, 0.0, -0.5], "q_0_0": [0.0, 0.0, 0.0, 0.5, 0.5]}


# twice the distance from the root's value 0, since the shared segment's is 0 too
GAIN = SOFT | {"q_1_0": [0.0, 0.0, 0.0, -1.0], "p_0_0": [1.0] * 3, "q_0_0": [0.0, 0.0, 0.0, 1.0, 1.0], "p_1_0": [-1.0]}


@pytest.mark.parametrize(("adv_estimator", "expected"), [("grpo", SOFT), ("arpo_hard", HARD), ("tree_gain", GAIN)])
def test_advantages_and_what_is_told_of_them(queue, adv_estimator, expected):
    metrics = {}
    trainer(adv_estimator)._compute_advantage(queue.batch(), metrics)
    assert advantages(queue) == expected
    # 4 of the model's 11 tokens are shared, and hard differs from soft by 0.5 there
    assert metrics["credit/shared_tokens"] == pytest.approx(4 / 11)
    assert metrics["credit/hard_minus_soft"] == pytest.approx(0.5 * 4 / 11)


@pytest.mark.parametrize("adv_estimator", ["grpo", "arpo_hard", "tree_path"])
def test_a_rollout_without_segments_shares_nothing(queue, adv_estimator):
    for row in queue.rows.values():
        del row["extra_fields"]["segment_ids"]
    metrics = {}
    trainer(adv_estimator)._compute_advantage(queue.batch(), metrics)
    assert advantages(queue) == SOFT and not [name for name in metrics if name.startswith("credit/")]


def test_a_segment_for_each_token():
    extras = {"a_0_0": {"segment_ids": [0, 0]}, "a_1_0": {"segment_ids": np.array([0, 0, 4])}}
    padded = pad_segment_ids(["a_0_0", "a_1_0", "pad_0_0"], [2, 3, 1], extras)
    assert padded.tolist() == [[0, 0, -1], [0, 0, 4], [-1, -1, -1]]
    with pytest.raises(ValueError, match="segment_ids of a_0_0: 2 for 5 response tokens"):
        pad_segment_ids(["a_0_0"], [5], extras)


def test_standardised_entropy_reaches_the_workers_loss(queue, monkeypatch):
    monkeypatch.setattr(PPOTrainerSync, "_compute_old_log_prob", lambda self, batch, metrics: batch)
    metrics = {}
    trainer("grpo", BalancedEntropy)._compute_old_log_prob(queue.batch(), metrics)
    # a tool's tokens (9.0) and padding (7.0) do not count
    values = [e for _, mask, entropy, _ in ROWS.values() for m, e in zip(mask, entropy, strict=True) if m]
    mean, std = np.mean(values), np.std(values)
    assert metrics["aepo/entropy_mean"] == pytest.approx(mean) and metrics["aepo/entropy_std"] == pytest.approx(std)
    assert metrics["aepo/advantage_grew"] == pytest.approx(np.mean(np.array(values) > mean))

    seen = []
    monkeypatch.setattr(field_losses, "ppo_loss", lambda *arguments: seen.append(STANDARDISED_ENTROPY.get()))
    keys = ["q_1_0", "p_1_0"]  # a micro-batch
    data = queue.kv_batch_get(keys, "train", [STANDARDISED_ENTROPY.name, "response_mask"])
    field_losses.ppo_loss_with_fields(None, None, data, fields=[STANDARDISED_ENTROPY.name])
    z = [[(e - mean) / std * m for m, e in zip(*ROWS[key][1:3], strict=True)] for key in keys]
    torch.testing.assert_close(seen[0], torch.tensor([z[0], z[1] + [0.0] * 3], dtype=torch.float32))


def parts(**changes):
    """A config with nothing but what components look at; all mechanisms off."""
    config = OmegaConf.create(
        {
            "actor_rollout_ref": {"actor": {}, "rollout": {"name": "vllm", "temperature_tau": 0.05}},
            "algorithm": {"adv_estimator": "grpo", "rollout_correction": {"bypass_mode": False}},
        }
    )
    for key, value in changes.items():
        OmegaConf.update(config, key, value, force_add=True)
    return config


ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


@pytest.mark.parametrize(
    ("mechanism", "component", "fields"),
    [
        (f"{ACTOR}.adaptive_clip", "NormalisedEntropy", ["entropy_h"]),
        (f"{ACTOR}.adaptive_advantage", "NormalisedEntropy", ["entropy_h"]),
        (f"{ROLLOUT}.adaptive_temperature", "NormalisedEntropy", []),
        (f"{ACTOR}.enable_entropy_balanced_advantage", "BalancedEntropy", ["standardised_entropy"]),
    ],
)
def test_a_mechanism_brings_its_component_whatever_the_trees_are(mechanism, component, fields):
    made = components_of(parts(**{mechanism: True}))
    assert [type(one).__name__ for one in made] == [component] and list(made[0].fields) == fields
    assert components_of(parts()) == []
    refused = parts(**{mechanism: True, "algorithm.rollout_correction.bypass_mode": True})
    with pytest.raises(ValueError, match="bypass_mode=true skips the pass that computes the entropies, which"):
        components_of(refused)


def test_two_mechanisms_are_two_components():
    both = parts(**{f"{ACTOR}.adaptive_clip": True, f"{ACTOR}.enable_entropy_balanced_advantage": True})
    assert [name for one in components_of(both) for name in one.fields] == ["entropy_h", "standardised_entropy"]
