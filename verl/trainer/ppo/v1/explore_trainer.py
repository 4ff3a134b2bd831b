"""Upstream's synchronous trainer with the components of methods, and a look at prompt groups and their trees.

One step, what is added marked with *:

    generate                    * components attach settings to the prompts (`before_rollout`)
    old log-probs, entropies    * components make token fields of the entropies; they go with the rows to the loss
    advantages                  * estimators know which tokens trajectories share (`SEGMENT_IDS`)
                                * diversity, metrics and trees of the groups; components look on (`after_advantage`)
    update the actor            * the loss has the token fields at hand
    save a checkpoint           * the components' state

    trainer.v1.trainer_mode=explore
    trainer.tree_freq=10      every so many steps trees go to <run folder>/trees/step_000010.jsonl; -1: never
    trainer.tree_prompts=8    of so many prompts; diversity is measured on as many

`scripts/view_trees.py` makes a page of them. Works for any rollout: where it made no tree, the tree is that of the
responses' common prefixes.
"""

import json
from collections import Counter, defaultdict
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import torch
import transfer_queue as tq
from omegaconf import DictConfig
from tensordict import NonTensorData, NonTensorStack, TensorDict
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.config import omega_conf_to_dataclass

from verl.trainer.ppo.group_diversity import group_diversity
from verl.trainer.ppo.tree_credit import SEGMENT_IDS, credit_metrics
from verl.trainer.ppo.v1.batch_rows import old_policy_entropy, place_of, put_token_field, real_keys
from verl.trainer.ppo.v1.components import components_of
from verl.trainer.ppo.v1.trainer_state import load_state, save_state
from verl.utils.atomic_files import replacing
from verl.workers.rollout.trajectory_tree import (
    OCCURRENCE,
    TREE,
    TREE_METRICS,
    TrajectoryTree,
    tree_of_rows,
    writes_trees,
)
from verl.workers.utils.field_losses import ppo_loss_with_fields


def trees_file(run_dir: str | Path, step: int) -> Path:
    return Path(run_dir) / "trees" / f"step_{step:06d}.jsonl"


def tree_record(tree: TrajectoryTree, step: int, uid: str, rewards: list[float], tokenizer) -> dict:
    """A line of the trees file: the tree, its rewards, and the text of every token id that occurs in it."""
    tokens = sorted({token for segment in tree.segments for token in segment.token_ids} | _suppressed_tokens(tree))
    return {
        "step": step,
        "uid": uid,
        "prompt": tokenizer.decode(tree.prompt_ids),
        "rewards": rewards,
        "segments": [asdict(segment) for segment in tree.segments],
        "leaves": tree.leaves,
        "metrics": tree.metrics,
        "vocabulary": {str(token): tokenizer.decode([token]) for token in tokens},
    }


def pad_segment_ids(keys: list[str], lengths: list[int], extras: dict[str, dict]) -> torch.Tensor:
    """The rollout's `segment_ids` as one tensor (B, T), -1 for tokens that are their trajectory's own.

    Args:
        keys: the rows.
        lengths: response tokens of each.
        extras: the rollout's extra fields by key; a row without any is padding. Rollouts that share nothing name no
            segments.

    Raises:
        ValueError: a row has not one segment for each response token.
    """
    padded = torch.full((len(keys), max(lengths, default=0)), -1)
    for row, (key, length) in enumerate(zip(keys, lengths, strict=True)):
        ids = extras.get(key, {}).get(SEGMENT_IDS.name)
        if ids is None:
            continue
        if len(ids) != length:
            raise ValueError(f"segment_ids of {key}: {len(ids)} for {length} response tokens")
        padded[row, :length] = torch.as_tensor(ids)
    return padded


def _suppressed_tokens(tree: TrajectoryTree) -> set[int]:
    return {candidate["token"] for segment in tree.segments for candidate in segment.info.get("suppressed", [])}


@register_trainer("explore")
class ExploreTrainer(PPOTrainerSync):
    """`trainer.v1.trainer_mode=explore`; the plug-in imports this module after `verl.trainer.ppo.v1`."""

    def __init__(self, config: DictConfig):
        config = config.copy()
        self.components = components_of(config)
        config.trainer.v1.trainer_mode = "sync"  # upstream asks for this name to choose buffer and checkpoint format
        super().__init__(config)

    def _setup(self):
        super()._setup()
        if fields := [name for component in self.components for name in component.fields]:
            actor_config = omega_conf_to_dataclass(self.config.actor_rollout_ref.actor)
            self.actor_rollout_wg.set_loss_fn(partial(ppo_loss_with_fields, config=actor_config, fields=fields))

    def prepare_step(self) -> dict:
        self.submitted: dict[str, int] = {}  # uid -> number, in the order of the data
        self.seen: Counter[str] = Counter()  # problems of this step
        return super().prepare_step()

    def _submit_batch_to_rollout(self, batch: TensorDict) -> int:
        for uid in batch["uid"]:
            self.submitted[uid] = len(self.submitted)
        problems = [str(list(prompt)) for prompt in batch["raw_prompt"]]
        # the same problem once more in a step gets other seeds
        batch[OCCURRENCE] = NonTensorStack(*(NonTensorData(self._count_of(problem)) for problem in problems))
        for component in self.components:
            component.before_rollout(batch)
        return super()._submit_batch_to_rollout(batch)

    def _count_of(self, problem: str) -> int:
        self.seen[problem] += 1
        return self.seen[problem] - 1

    def _balance_batch(self, batch, *args, **kwargs):
        """Upstream's, of rows in the order of the data: not of the one in which they came in."""
        places = [place_of(key) for key in batch.keys]
        order = sorted(range(len(places)), key=lambda i: (self.submitted[places[i].uid], *places[i][1:]))
        batch.keys, batch.tags = [batch.keys[i] for i in order], [batch.tags[i] for i in order]
        return super()._balance_batch(batch, *args, **kwargs)

    def _compute_old_log_prob(self, batch, metrics: dict):
        batch = super()._compute_old_log_prob(batch, metrics)
        asking = [component for component in self.components if component.entropy_for]
        if not asking:
            return batch
        entropy, mask, nested_mask = old_policy_entropy(batch)
        for component in asking:
            for name, values in component.token_fields(entropy, mask, metrics).items():
                batch = put_token_field(batch, name, values, nested_mask)
        return batch

    def _compute_advantage(self, batch, metrics: dict):
        sessions, extras = self._fetch_extras(batch)
        mask = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["response_mask"])
        segment_ids = pad_segment_ids(batch.keys, mask["response_mask"].offsets().diff().tolist(), extras)
        with SEGMENT_IDS.given(segment_ids):
            batch = super()._compute_advantage(batch, metrics)
            if (segment_ids >= 0).any():
                metrics.update(self._segment_metrics(batch))
        metrics.update(self._tree_metrics(batch, sessions, extras))
        metrics["tree/prompts"] = len(sessions)  # fewer than were asked for: the others' groups failed
        groups = self._fetch_groups(batch, sessions, extras)
        metrics.update(self._diversity(groups))
        if writes_trees(self.config, self.global_steps):
            self._write_trees(groups)
        for component in self.components:
            component.after_advantage(batch, metrics)
        return batch

    def _save_checkpoint(self):
        for component in self.components:
            if component.state_file and (state := component.state_dict()) is not None:
                save_state(self, component.state_file, state)
        super()._save_checkpoint()

    def _load_checkpoint(self):
        super()._load_checkpoint()
        for component in self.components:
            if component.state_file and (state := load_state(self, component.state_file)):
                component.load_state_dict(state)

    def _fetch_extras(self, batch) -> tuple[dict[str, list[str]], dict[str, dict]]:
        """uid -> keys of its rows in session order, and key -> the rollout's extra fields."""
        keys = real_keys(batch)
        data = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=["extra_fields"])
        sessions = defaultdict(list)
        for key in sorted(keys, key=lambda key: place_of(key).session):
            sessions[place_of(key).uid].append(key)
        return sessions, dict(zip(keys, list(data["extra_fields"]), strict=True))

    def _fetch_groups(self, batch, sessions: dict[str, list[str]], extras: dict[str, dict]) -> dict[str, list[dict]]:
        """uid -> its rows in session order, of the first `tree_prompts` prompts."""
        chosen = sorted(sessions, key=self.submitted.__getitem__)[: self.config.trainer.get("tree_prompts", 8)]
        keys = [key for uid in chosen for key in sessions[uid]]
        fields = ["prompts", "responses", "rm_scores"]
        if self.config.actor_rollout_ref.rollout.calculate_log_probs:
            fields.append("rollout_log_probs")
        data = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=fields)
        columns = {name: data[name].unbind() for name in fields}
        rows = {key: {name: column[i].tolist() for name, column in columns.items()} for i, key in enumerate(keys)}
        for key, row in rows.items():
            row["answer"] = (extras[key].get("reward_extra_info") or {}).get("pred")
            row["reward"] = sum(row["rm_scores"])
            row["tree"] = extras[key].get(TREE)
        return {uid: [rows[key] for key in sessions[uid]] for uid in chosen}

    def _segment_metrics(self, batch) -> dict[str, float]:
        """`credit_metrics`, whichever credit is trained on."""
        rewards = "token_level_rewards" if self.config.algorithm.use_kl_in_reward else "rm_scores"
        fields = ["uid", rewards, "response_mask"]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        index = np.array(list(data["uid"]), dtype=object)
        data = data.exclude("uid").to_padded_tensor()
        norm = self.config.algorithm.get("norm_adv_by_std_in_grpo", True)
        return credit_metrics(data[rewards], data["response_mask"], index, norm)

    def _tree_metrics(self, batch, sessions: dict[str, list[str]], extras: dict[str, dict]) -> dict[str, float]:
        """Means over the prompts whose trees have the metric; `tokens_generated` also of those without a tree."""
        values = defaultdict(list)
        length_of = {key: tag.get("response_len", 0) for key, tag in zip(batch.keys, batch.tags, strict=True)}
        for keys in sessions.values():
            plain = {"tokens_generated": sum(length_of[key] for key in keys)}
            of_tree = next((found for key in keys if (found := extras[key].get(TREE_METRICS))), plain)
            for name, value in of_tree.items():
                values[f"tree/{name}"].append(value)
        return {name: float(np.mean(of_trees)) for name, of_trees in values.items()}

    def _diversity(self, groups: dict[str, list[dict]]) -> dict[str, float]:
        found = defaultdict(list)
        for rows in groups.values():
            answers = [row["answer"] for row in rows]
            known = None if all(answer is None for answer in answers) else answers
            for name, value in group_diversity([row["responses"] for row in rows], known).items():
                found[f"diversity/{name}"].append(value)
        return {name: float(np.mean(of_groups)) for name, of_groups in found.items()}

    def _about_tree(self, uid: str, tree: TrajectoryTree) -> None:
        """What a recipe knows of a tree's segments by now, such as rewards: it goes into their `info`."""

    def _write_trees(self, groups: dict[str, list[dict]]) -> None:
        path = trees_file(self.config.trainer.default_local_dir, self.global_steps)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as unfinished, unfinished.open("w") as out:
            for uid, rows in groups.items():
                text = next((row["tree"] for row in rows if row["tree"]), None)
                if text:
                    tree = TrajectoryTree.from_json(text)
                else:
                    log_probs = [row["rollout_log_probs"] for row in rows] if "rollout_log_probs" in rows[0] else None
                    tree = tree_of_rows(rows[0]["prompts"], [row["responses"] for row in rows], log_probs)
                self._about_tree(uid, tree)
                record = tree_record(tree, self.global_steps, uid, [row["reward"] for row in rows], self.tokenizer)
                out.write(json.dumps(record) + "\n")
