"""A training step without Ray: a trainer as users configure it, and rows on a TransferQueue in memory."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf, open_dict
from tensordict import TensorDict
from transfer_queue import BatchMeta, KVBatchMeta
from transfer_queue.metadata import extract_field_schema
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.tensordict_utils import get_tensordict, list_of_dict_to_tensordict

import verl.trainer
from tests.configs import copied
from verl.trainer.ppo.v1.batch_rows import ORDER, PROBLEM
from verl.trainer.ppo.v1.explore_trainer import ExploreTrainer

UPSTREAM = Path(verl.trainer.__path__[0]) / "config"
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


@cache
def _upstream() -> DictConfig:
    with initialize_config_dir(str(UPSTREAM), version_base=None):
        return compose("ppo_trainer")


def config_of(values: dict) -> DictConfig:
    """Upstream's config with these values, by dotted key, and what every recipe sets."""
    values = {
        "trainer.v1.trainer_mode": "explore",
        "trainer.tree_freq": -1,
        f"{ROLLOUT}.name": "vllm",
        f"{ROLLOUT}.n": 2,
    } | values
    config = copied(_upstream())
    with open_dict(config):
        for key, value in values.items():
            OmegaConf.update(config, key, value, force_add=True)
    return config


def trainer_of(values: dict) -> ExploreTrainer:
    """Return a trainer at step 1 of 10."""
    trainer = ExploreTrainer(config_of(values))
    trainer.global_steps, trainer.total_training_steps = 1, 10
    return trainer


def prompts_of(questions: Sequence[str], **columns: list) -> TensorDict:
    """The batch of these prompts as it goes to the rollout."""
    messages = [[{"role": "user", "content": question}] for question in questions]
    columns = {"raw_prompt": messages} | columns
    return get_tensordict({name: np.fromiter(column, object) for name, column in columns.items()})


def credited(made: ExploreTrainer, batch) -> dict:
    """Compute the advantages of a batch, whose rows have old log-probabilities, as a step does; return the metrics."""
    metrics: dict = {}
    with patch.object(PPOTrainerSync, "_compute_old_log_prob", lambda self, batch, metrics: batch):
        made._compute_advantage(made._compute_old_log_prob(batch, metrics), metrics)
    return metrics


class MemoryQueue:
    """A stand-in for the part of `transfer_queue` that a step uses; `rows` and `tags` are its content by key."""

    def __init__(self, monkeypatch):
        self.rows: dict[str, dict] = {}
        self.tags: dict[str, dict] = {}
        monkeypatch.setattr("transfer_queue.kv_batch_get", self.kv_batch_get)
        monkeypatch.setattr("transfer_queue.kv_batch_put", self.kv_batch_put)
        monkeypatch.setattr("verl.utils.transferqueue_utils.kv_batch_meta2batch_meta", self.batch_meta)

    def add(self, key: str, reward: float, mask: list[int], order: int = 0, tag: dict | None = None, **fields) -> None:
        """A row; lists become tensors."""
        scores, uid = torch.zeros(len(mask)), key.rsplit("_", 2)[0]
        scores[-1] = reward
        row = {"uid": uid, "prompts": [3], "response_mask": mask, "loss_mask": mask, "rm_scores": scores}
        row |= {"responses": list(range(len(mask))), "old_log_probs": [0.0] * len(mask), "extra_fields": {}}
        row |= {ORDER: order, PROBLEM: f"problem of {uid}"} | fields
        self.rows[key] = {name: torch.tensor(v) if isinstance(v, list) else v for name, v in row.items()}
        lengths = {"prompt_len": 1, "response_len": len(mask), "seq_len": 1 + len(mask)}
        self.tags[key] = {"global_steps": 1} | lengths | (tag or {})

    def batch(self, *prefixes: str) -> KVBatchMeta:
        """The rows whose keys begin so, or all, in no useful order."""
        keys = [key for key in self.rows if key.startswith(prefixes or "")][::-1]
        return KVBatchMeta(keys=keys, tags=[self.tags[key] for key in keys], partition_id="train")

    def kv_batch_get(self, keys, partition_id, select_fields=None):
        common = set.intersection(*(set(self.rows[key]) for key in keys))
        names = [name for name in select_fields or sorted(common) if name in common]
        columns = {name: [self.rows[key][name] for key in keys] for name in names}
        is_tensor = {name: isinstance(column[0], torch.Tensor) for name, column in columns.items()}
        others = [{name: columns[name][i] for name in names if not is_tensor[name]} for i in range(len(keys))]
        data = list_of_dict_to_tensordict(others)
        for name in filter(is_tensor.get, names):
            data[name] = torch.nested.as_nested_tensor(columns[name], layout=torch.jagged)
        return data

    def kv_batch_put(self, keys, partition_id, fields=None, tags=None):
        for i, key in enumerate(keys):
            self.tags[key] = self.tags.get(key, {}) | (tags[i] if tags else {})
            self.rows.setdefault(key, {})
        for name in fields.keys() if fields is not None else ():
            column = fields[name]
            values = column.unbind() if isinstance(column, torch.Tensor) else list(column)
            for key, value in zip(keys, values, strict=True):
                self.rows[key][name] = value
        return KVBatchMeta(keys=list(keys), tags=[self.tags[key] for key in keys], partition_id=partition_id)

    def batch_meta(self, batch: KVBatchMeta) -> BatchMeta:
        """The columns of a batch, as the queue's controller knows them."""
        data = self.kv_batch_get(batch.keys, batch.partition_id, batch.fields)
        rows = list(range(len(batch)))
        return BatchMeta(
            global_indexes=rows, partition_ids=["train"] * len(rows), field_schema=extract_field_schema(data)
        )

    def column(self, name: str) -> dict[str, list]:
        return {key: row[name].tolist() for key, row in self.rows.items()}
