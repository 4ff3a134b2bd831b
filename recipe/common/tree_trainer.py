"""Upstream's synchronous trainer that also looks at prompt groups: diversity, tree metrics, trees for the viewer.

    trainer.v1.trainer_mode=trees
    trainer.tree_freq=10      every so many steps trees go to <run folder>/trees/step_000010.jsonl; -1: never
    trainer.tree_prompts=8    of so many prompts; diversity is measured on as many

`scripts/view_trees.py` makes a page of them. Works for any rollout: where it made no tree, the tree is that of the
responses' common prefixes.
"""

import json
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path

import numpy as np
import transfer_queue as tq
from omegaconf import DictConfig
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from recipe.common.results import replacing
from verl.trainer.ppo.group_diversity import group_diversity
from verl.workers.rollout.trajectory_tree import TREE, TrajectoryTree, tree_of_rows


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


def _suppressed_tokens(tree: TrajectoryTree) -> set[int]:
    return {candidate["token"] for segment in tree.segments for candidate in segment.info.get("suppressed", [])}


@register_trainer("trees")
class TreeTrainer(PPOTrainerSync):
    """`trainer.v1.trainer_mode=trees`."""

    def __init__(self, config: DictConfig):
        config = config.copy()
        config.trainer.v1.trainer_mode = "sync"  # upstream asks for this name to choose buffer and checkpoint format
        super().__init__(config)

    def _compute_advantage(self, batch, metrics: dict):
        batch = super()._compute_advantage(batch, metrics)
        groups, trees = self._fetch_groups(batch)
        metrics.update(self._tree_metrics(trees.values()))
        metrics.update(self._diversity(groups))
        freq = self.config.trainer.get("tree_freq", -1)
        if freq > 0 and self.global_steps % freq == 0:
            self._write_trees(groups, trees)
        return batch

    def _fetch_groups(self, batch) -> tuple[dict[str, list[dict]], dict[str, TrajectoryTree]]:
        """uid -> its rows in session order (prompt, response, log-probs, reward, answer), and uid -> its tree."""
        keys = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding", False)]
        fields = ["uid", "prompts", "responses", "rm_scores", "extra_fields"]
        if self.config.actor_rollout_ref.rollout.calculate_log_probs:
            fields.append("rollout_log_probs")
        data = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=fields)
        columns = {name: data[name].unbind() for name in fields if name not in ("uid", "extra_fields")}
        groups, trees = defaultdict(list), {}
        for i, (key, uid, extra) in enumerate(zip(keys, list(data["uid"]), list(data["extra_fields"]), strict=True)):
            session = int(key.rsplit("_", 2)[1])
            row = {name: column[i].tolist() for name, column in columns.items()}
            answer = (extra.get("reward_extra_info") or {}).get("pred")
            groups[uid].append(row | {"session": session, "answer": answer, "reward": sum(row["rm_scores"])})
            if extra.get(TREE):
                trees[uid] = TrajectoryTree.from_json(extra[TREE])
        for rows in groups.values():
            rows.sort(key=lambda row: row["session"])
        return groups, trees

    def _tree_metrics(self, trees) -> dict[str, float]:
        """Means over the prompts whose trees have the metric."""
        values = defaultdict(list)
        for tree in trees:
            for name, value in tree.metrics.items():
                values[f"tree/{name}"].append(value)
        return {name: float(np.mean(of_trees)) for name, of_trees in values.items()}

    def _diversity(self, groups: dict[str, list[dict]]) -> dict[str, float]:
        found = defaultdict(list)
        for rows in list(groups.values())[: self.config.trainer.get("tree_prompts", 8)]:
            answers = [row["answer"] for row in rows]
            known = None if all(answer is None for answer in answers) else answers
            for name, value in group_diversity([row["responses"] for row in rows], known).items():
                found[f"diversity/{name}"].append(value)
        return {name: float(np.mean(of_groups)) for name, of_groups in found.items()}

    def _write_trees(self, groups: dict[str, list[dict]], trees: dict[str, TrajectoryTree]) -> None:
        path = trees_file(self.config.trainer.default_local_dir, self.global_steps)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as unfinished, unfinished.open("w") as out:
            for uid, rows in list(groups.items())[: self.config.trainer.get("tree_prompts", 8)]:
                tree = trees.get(uid)
                if tree is None:
                    log_probs = [row["rollout_log_probs"] for row in rows] if "rollout_log_probs" in rows[0] else None
                    tree = tree_of_rows(rows[0]["prompts"], [row["responses"] for row in rows], log_probs)
                record = tree_record(tree, self.global_steps, uid, [row["reward"] for row in rows], self.tokenizer)
                out.write(json.dumps(record) + "\n")
