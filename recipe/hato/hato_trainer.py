"""HATO's training step: upstream's with searched trees, rewards of their nodes, and a value model that learns online.

One step, what is HATO's marked with *:

    generate                    * prompts carry the step's temperature and the value model -> trees of steps
      filter_groups             * trees that are all right or all wrong are replaced one by one (TreeBuffer)
    advantages                  * outcomes -> R of every node -> adv_estimator=hato, each against its siblings
                                * the value model learns from all trees, the dropped ones too
    update the actor            * meta-learning: the episode begins, goes on or ends (MetaActorWorker)
    save a checkpoint           * hato.pt: value model, reference paths, record of problems; the episode with the actor
"""

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from typing import NamedTuple

import numpy as np
import ray
import torch
import transfer_queue as tq
from omegaconf import DictConfig
from tensordict import TensorDict
from torchdata.stateful_dataloader import StatefulDataLoader
from verl.utils.dataset.rl_dataset import collate_fn
from verl.workers.engine_workers import ActorRolloutRefWorker

from verl.trainer.ppo.hato_algos import (
    Steps,
    TreeColumns,
    collate_steps,
    family_metrics,
    given_steps,
    informative_mask,
    step_advantages,
)
from verl.trainer.ppo.v1 import register_trainer
from verl.trainer.ppo.v1.batch_rows import place_of, put_token_field, real_keys
from verl.trainer.ppo.v1.explore_trainer import ExploreTrainer
from verl.trainer.ppo.v1.trainer_state import load_state, save_state
from verl.trainer.ppo.v1.tree_buffer import TreeBuffer
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.domain_sampler import DomainSampler
from verl.workers.config.hato import filters_groups, hato_config
from verl.workers.meta_workers import MetaActorWorker
from verl.workers.rollout.trajectory_tree import TrajectoryTree
from verl.workers.rollout.trees.hato.calibration import reliability_table
from verl.workers.rollout.trees.hato.config import RewardWeights
from verl.workers.rollout.trees.hato.messages import LEAF, MAX_NODES, SETTINGS, TREE_STATE, pack
from verl.workers.rollout.trees.hato.metrics import ReferencePaths, novelty, rdi, reward_metrics
from verl.workers.rollout.trees.hato.rewards import NodeRewards, Outcomes, leaf_outcomes, rewards_of, successful_leaves
from verl.workers.rollout.trees.hato.search import temperature_at, ucb_grants
from verl.workers.rollout.trees.hato.tree import ROOT, ReasoningTree
from verl.workers.rollout.trees.hato.value_model import value_model_of
from verl.workers.utils.meta_learning import episode_calls, episode_length

STATE_FILE = "hato.pt"


class SearchedTree(NamedTuple):
    """A problem's tree as it came back.

    Args:
        uid: of the prompt.
        tree: without tokens; its leaves have outcomes.
        features: of every node, see `step_features`.
        rewards, outcomes: of every node.
        leaf_of: row's key -> the leaf that its path ends in.
    """

    uid: str
    tree: ReasoningTree
    features: list[list[float]]
    rewards: NodeRewards
    outcomes: Outcomes
    leaf_of: dict[str, int]

    def node_ids(self, key: str) -> np.ndarray:
        """The node of each response token of a row."""
        path = self.tree.path(self.leaf_of[key])
        return np.repeat(path, [self.tree.nodes[node].n_tokens for node in path])

    def verified_rewards(self, weights: RewardWeights) -> list[float]:
        """R of every node without R_local, by which almost any two steps differ; where there is nothing else, R."""
        if weights.beta == weights.gamma == 0:
            return self.rewards.total
        of = zip(self.rewards.path, self.rewards.causal, strict=True)
        return [weights.beta * path + weights.gamma * causal for path, causal in of]

    def columns(self) -> TreeColumns:
        return TreeColumns(self.tree.parents(), self.rewards.total, self.tree.trained_counts())

    def share_of_varying_families(self, weights: RewardWeights) -> float:
        """How much the tree told: families of steps whose verified rewards differ."""
        columns = self.columns()._replace(rewards=self.verified_rewards(weights))
        return 1 - family_metrics(collate_steps([columns], []), torch.zeros(0, 0))["flat_families"]


@register_trainer("hato")
class HATOTrainer(ExploreTrainer):
    """`trainer.v1.trainer_mode=hato`."""

    def __init__(self, config: DictConfig):
        self.hato = hato_config(config)
        self.dropped: list[SearchedTree] = []
        self.searched: dict[str, SearchedTree] = {}
        self.advantages: dict[str, torch.Tensor] = {}
        self.packed_model = b""
        # problem -> nodes that its trees had so far, and the share of its families that varied at the last visit
        self.record: dict[str, tuple[int, float]] = {}
        self.problem_of: dict[str, str] = {}
        self.references = ReferencePaths(self.hato.memory.reference_prompts, self.hato.memory.reference_paths)
        super().__init__(config)
        self.value_model = value_model_of(self.hato, config.actor_rollout_ref.rollout.seed)

    # ---- set-up ----

    def _build_replay_buffer(self):
        if not filters_groups(self.config):
            return super()._build_replay_buffer()
        filters = self.config.algorithm.filter_groups
        bound, filters.max_num_gen_batches = filters.get("max_num_gen_batches", 0), 0  # upstream warns of ignoring it
        metric = self._resolve_filter_groups_metric()
        filters.max_num_gen_batches = bound
        sampler = self.config.trainer.v1.sampler
        return TreeBuffer(
            trainer_mode=self.trainer_mode,
            trainer_config=self.config.trainer.v1.get(self.trainer_mode, {}),
            max_off_policy_threshold=sampler.max_off_policy_threshold,
            max_off_policy_strategy=sampler.max_off_policy_strategy,
            sampler_kwargs=sampler.sampler_kwargs,
            refill_fn=self._add_prompts_to_generate,
            filter_groups_metric=metric,
            train_batch_size=self.config.data.train_batch_size,
            gen_batch_size=1,
            max_num_gen_batches=bound,
            on_drop=self._keep_dropped,
        )

    def _keep_dropped(self, keys: Sequence[str]) -> None:
        """They teach the value model, and are a problem's first visit as much as others."""
        trees = self._fetch_trees(keys, "train")
        self.dropped.extend(trees)
        if self.hato.metrics.novelty:
            self._keep_references(trees, "train")

    def _init_resource_pool_mgr(self):
        super()._init_resource_pool_mgr()
        if self.hato.meta_learning.enable:
            for role, worker in self.role_worker_mapping.items():
                if worker.__ray_metadata__.modified_class.__ray_actor_class__ is ActorRolloutRefWorker:
                    self.role_worker_mapping[role] = ray.remote(MetaActorWorker)

    def _init_dataloader(self):
        super()._init_dataloader()
        meta = self.hato.meta_learning
        if not meta.enable:
            return
        length = episode_length(meta.method, meta.n_inner_steps)
        if self.total_training_steps % length:
            whole = max(1, self.total_training_steps // length) * length
            raise ValueError(
                f"{self.total_training_steps} training steps are not whole episodes of hato.meta_learning, which take "
                f"{length} steps each: set trainer.total_training_steps={whole}"
            )
        domains = list(self.train_dataset.dataframe["data_source"])
        if len(set(domains)) == 1:
            raise ValueError(
                f"hato.meta_learning.enable: all {len(domains)} rows of data.train_files have the data_source "
                f"{domains[0]}; it learns over domains, give it at least two"
            )
        batch_size = self.train_dataloader.batch_size
        self.train_dataloader = StatefulDataLoader(
            dataset=self.train_dataset,
            batch_size=batch_size,
            num_workers=self.config.data.dataloader_num_workers,
            drop_last=True,
            collate_fn=collate_fn,
            sampler=DomainSampler(
                domains,
                block=self.config.data.train_batch_size * length,
                seed=self.config.data.get("seed") or 0,
            ),
        )

    # ---- rollout ----

    @property
    def temperature(self) -> float:
        """Of this step's sampling, and so of the policy that the loss sees."""
        return temperature_at((self.global_steps - 1) / self.total_training_steps, self.hato.exploration)

    def prepare_step(self) -> dict:
        self.dropped, self.problem_of = [], {}
        state = self.value_model.state_dict()
        self.packed_model = pack({name: value for name, value in state.items() if name != "optimizer"})
        self.config.actor_rollout_ref.rollout.temperature = self.temperature
        return super().prepare_step()

    def _submit_batch_to_rollout(self, batch: TensorDict) -> int:
        settings = {"step": self.global_steps, "temperature": self.temperature, "value_model": self.packed_model}
        tu.assign_non_tensor_data(batch, SETTINGS, settings)
        problems = [hashlib.sha1(str(list(prompt)).encode()).hexdigest() for prompt in batch["raw_prompt"]]
        self.problem_of |= dict(zip(batch["uid"], problems, strict=True))
        if self.hato.exploration.nodes_per_tree:
            batch[MAX_NODES] = torch.tensor(self._shared_nodes(problems))
        return super()._submit_batch_to_rollout(batch)

    def _shared_nodes(self, problems: Sequence[str]) -> list[int]:
        """So many nodes for each problem's tree: `nodes_per_tree` on average, from 2 to `max_nodes`.

        What replaces a dropped prompt gets the average, so that no tree depends on how many came at once.
        """
        average, most = self.hato.exploration.nodes_per_tree, self.hato.tree.max_nodes
        if len(problems) < self.config.data.train_batch_size:
            return [min(average, most)] * len(problems)
        # nobody knows of a new problem that it tells nothing
        known = [self.record.get(problem, (0, 1.0)) for problem in problems]
        grants = ucb_grants(
            [varied for _, varied in known],
            [nodes for nodes, _ in known],
            budget=max(0, average - 2) * len(problems),
            coef=self.hato.exploration.ucb_coef,
        )
        # a single step has nothing beside it to be compared with
        return [min(most, 2 + grant) for grant in grants]

    # ---- trees ----

    def _fetch_trees(self, keys: Sequence[str], partition_id: str) -> list[SearchedTree]:
        """The trees of these rows, in the order in which their prompts were submitted."""
        fields = ["extra_fields", "rm_scores"]
        data = tq.kv_batch_get(keys=list(keys), partition_id=partition_id, select_fields=fields)
        rows = defaultdict(dict)
        for key, extra, scores in zip(keys, list(data["extra_fields"]), data["rm_scores"].unbind(), strict=True):
            rows[place_of(key).uid][key] = (extra, scores.sum().item())
        return [self._searched_tree(uid, rows[uid]) for uid in sorted(rows, key=self.submitted.__getitem__)]

    def _searched_tree(self, uid: str, rows: dict[str, tuple[dict, float]]) -> SearchedTree:
        state = next(extra[TREE_STATE] for extra, _ in rows.values() if TREE_STATE in extra)
        tree = ReasoningTree.from_structure(state["structure"])
        leaf_of = {key: extra[LEAF] for key, (extra, _) in rows.items()}
        for key, (_, score) in rows.items():
            tree.nodes[leaf_of[key]].outcome = score
        outcomes = leaf_outcomes(tree, self.hato.verification_threshold)
        rewards = rewards_of(tree, outcomes, self.hato.reward_weights, self.hato.path_reward)
        return SearchedTree(uid, tree, state["features"], rewards, outcomes, leaf_of)

    def _compute_advantage(self, batch, metrics: dict):
        trees = self._fetch_trees(real_keys(batch), batch.partition_id)
        self.searched = {tree.uid: tree for tree in trees}
        mask = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["response_mask"])
        nested_mask = mask["response_mask"]
        steps = self._steps(batch, trees, nested_mask)
        self.advantages = self._advantages_of(trees, steps)
        with given_steps(steps):
            batch = super()._compute_advantage(batch, metrics)
        if self.dropped and "tree/tokens_generated" in metrics:
            metrics["tree/tokens_generated"] += sum(map(_tokens_of, self.dropped)) / len(trees)
        # rollout correction may have taken tokens out
        mask = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["response_mask"])
        padded = mask.to_padded_tensor()["response_mask"]
        weights = self.hato.reward_weights
        verified = [reward for tree in trees for reward in tree.verified_rewards(weights)]
        verified_steps = steps._replace(rewards=torch.tensor(verified, dtype=torch.float64))
        metrics.update({f"hato/{name}": value for name, value in family_metrics(verified_steps, padded).items()})
        everything = sorted([*trees, *self.dropped], key=lambda tree: self.submitted[tree.uid])
        metrics.update(self._metrics_of(trees, everything))
        if self.hato.metrics.novelty:
            metrics.update(self._novelty(batch.partition_id))
            self._keep_references(trees, batch.partition_id)
        self._learn(everything)
        if filters_groups(self.config):
            kept = informative_mask(verified_steps, padded)
            if kept.any():
                # upstream's loss divides by loss_mask's tokens
                for name in ("response_mask", "loss_mask"):
                    batch = put_token_field(batch, name, kept, nested_mask)
        return batch

    def _steps(self, batch, trees: Sequence[SearchedTree], nested_mask: torch.Tensor) -> Steps:
        number = {tree.uid: i for i, tree in enumerate(trees)}
        real, rows = set(real_keys(batch)), []
        lengths = nested_mask.offsets().diff().tolist()
        for key, length in zip(batch.keys, lengths, strict=True):
            uid = place_of(key).uid
            node_ids = self.searched[uid].node_ids(key) if key in real else None
            if node_ids is not None and len(node_ids) != length:
                raise ValueError(f"{key}: the tree's path has {len(node_ids)} tokens, the response {length}")
            rows.append(None if node_ids is None else (number[uid], node_ids))
        return collate_steps([tree.columns() for tree in trees], rows, max(lengths))

    def _advantages_of(self, trees: Sequence[SearchedTree], steps: Steps) -> dict[str, torch.Tensor]:
        """uid -> advantage of every node, for the viewer."""
        norm = self.config.algorithm.get("norm_adv_by_std_in_grpo", True)
        of_nodes = step_advantages(steps, norm_adv_by_std_in_grpo=norm)
        parts = of_nodes.advantages.split([len(tree.tree.nodes) for tree in trees])
        return {tree.uid: part for tree, part in zip(trees, parts, strict=True)}

    # ---- learning and metrics ----

    def _learn(self, trees: Sequence[SearchedTree]) -> None:
        """The value model observes every verified step; the record of problems, how much their trees told."""
        features, outcomes, _ = self._observations(trees)
        if features:
            self.value_model.observe(features, outcomes)
        for tree in trees:
            problem = self.problem_of[tree.uid]
            nodes, _ = self.record.pop(problem, (0, 0.0))
            told = tree.share_of_varying_families(self.hato.reward_weights)
            self.record[problem] = (nodes + len(tree.tree.nodes) - 1, told)
        for problem in list(self.record)[: -self.hato.memory.problems]:
            del self.record[problem]

    def _observations(self, trees: Sequence[SearchedTree]) -> tuple[list[list[float]], list[float], list[float]]:
        """Features, share of right paths, and V when it was drawn, of every step with verified paths below."""
        features, outcomes, values = [], [], []
        for one in trees:
            right, verified = one.outcomes.right, one.outcomes.verified
            for number, node in enumerate(one.tree.nodes):
                if number != ROOT and one.tree.is_kept(number) and verified[number]:
                    features.append(one.features[number])
                    outcomes.append(right[number] / verified[number])
                    values.append(node.value)
        return features, outcomes, values

    def _metrics_of(self, trees: Sequence[SearchedTree], everything: Sequence[SearchedTree]) -> dict[str, float]:
        found = defaultdict(list)
        for one in trees:
            for name, value in reward_metrics(one.tree, one.rewards).items():
                found[name].append(value)
        metrics = {f"hato/{name}": float(np.mean(values)) for name, values in found.items()}
        metrics |= {"hato/trees_kept": len(trees), "hato/trees_dropped": len(self.dropped)}
        metrics["hato/temperature"] = self.temperature
        # of what was drawn; rows repeat the first leaves where a tree has fewer than n
        shares = [
            one.outcomes.right[ROOT] / one.outcomes.verified[ROOT] for one in everything if one.outcomes.verified[ROOT]
        ]
        if shares:
            metrics["hato/accuracy"] = float(np.mean(shares))
        _, outcomes, values = self._observations(everything)
        if outcomes:
            metrics["hato/value_calibration_error"] = reliability_table(values, outcomes).ece
        return metrics

    def _diversity(self, groups: dict[str, list[dict]]) -> dict[str, float]:
        """Also RDI."""
        metrics, found = super()._diversity(groups), []
        for rows in groups.values():
            right = {tuple(row["responses"]) for row in rows if row["reward"] > self.hato.verification_threshold}
            found.append(rdi(sorted(right), self.hato.metrics.max_paths))
        known = [value for value in found if value is not None]
        return metrics | ({"hato/rdi": float(np.mean(known))} if known else {})

    def _novelty(self, partition_id: str) -> dict[str, float]:
        """Of problems that have reference paths: how far right paths are from them."""
        known = [one for uid, one in self.searched.items() if self.problem_of[uid] in self.references]
        found = []
        for one, path_of in zip(known, self._paths(known, partition_id), strict=True):
            right = [path_of[leaf] for leaf in successful_leaves(one.tree, self.hato.verification_threshold)]
            found.append(novelty(right, self.references.of(self.problem_of[one.uid]), self.hato.metrics.max_paths))
        found = [value for value in found if value is not None]
        return {"hato/novelty": float(np.mean(found))} if found else {}

    def _keep_references(self, trees: Sequence[SearchedTree], partition_id: str) -> None:
        """Paths of problems that are seen for the first time."""
        new = [one for one in trees if self.references.wants(self.problem_of[one.uid])]
        for one, path_of in zip(new, self._paths(new, partition_id), strict=True):
            self.references.keep(self.problem_of[one.uid], [path for _, path in sorted(path_of.items())])

    def _paths(self, trees: Sequence[SearchedTree], partition_id: str) -> list[dict[int, list[int]]]:
        """For each tree, the response tokens of each leaf."""
        if not trees:
            return []
        keys_of = [{leaf: key for key, leaf in one.leaf_of.items()} for one in trees]
        keys = [key for of_tree in keys_of for key in of_tree.values()]
        data = tq.kv_batch_get(keys=keys, partition_id=partition_id, select_fields=["responses"])
        response = dict(zip(keys, (row.tolist() for row in data["responses"].unbind()), strict=True))
        return [{leaf: response[key] for leaf, key in of_tree.items()} for of_tree in keys_of]

    def _about_tree(self, uid: str, tree: TrajectoryTree) -> None:
        one = self.searched[uid]
        for segment in tree.segments:
            node = segment.info["node"]
            segment.info |= {f"R_{part}": values[node] for part, values in one.rewards._asdict().items()}
            segment.info["advantage"] = self.advantages[uid][node].item()

    # ---- meta-learning ----

    def _update_actor(self, batch, metrics: dict):
        meta = self.hato.meta_learning
        if not meta.enable:
            return super()._update_actor(batch, metrics)
        before, after = episode_calls(self.global_steps, meta.method, meta.n_inner_steps)
        for call in before:
            settings = {"method": meta.method, "meta_lr": meta.meta_lr, "inner_lr": meta.inner_lr}
            getattr(self.actor_rollout_wg, call)(**(settings if call == "meta_begin" else {}))
        batch = super()._update_actor(batch, metrics)
        for call in after:
            metrics.update(getattr(self.actor_rollout_wg, call)()[0])
        return batch

    # ---- checkpoint ----

    def _save_checkpoint(self):
        record = {problem: list(values) for problem, values in self.record.items()}
        state = {"value_model": self.value_model.state_dict(), "references": self.references.state_dict()}
        settings = {name: asdict(getattr(self.hato, name)) for name in ("uncertainty", "meta_learning")}
        save_state(self, STATE_FILE, state | settings | {"record": record})
        super()._save_checkpoint()

    def _load_checkpoint(self):
        super()._load_checkpoint()
        if state := load_state(self, STATE_FILE):
            self._check_model(state["uncertainty"])
            self._check_episode(state["meta_learning"])
            self.value_model.load_state_dict(state["value_model"])
            self.references.load_state_dict(state["references"])
            self.record = {problem: tuple(values) for problem, values in state["record"].items()}

    def _check_model(self, saved: dict) -> None:
        """
        Raises:
            ValueError: the checkpoint's value model has another shape.
        """
        now = asdict(self.hato.uncertainty)
        for name in ("method", "n_models", "n_passes", "model_config"):
            if saved[name] != now[name]:
                raise ValueError(
                    f"hato.uncertainty.{name} was {saved[name]} in the checkpoint and is {now[name]}: a value model of "
                    "another shape cannot go on; leave it as it was, or start anew"
                )

    def _check_episode(self, saved: dict) -> None:
        """
        Raises:
            ValueError: an episode of meta-learning was open and is to go on in another way, or is not open and would.
        """
        now = asdict(self.hato.meta_learning)
        if saved != now and any(_is_open(meta, self.global_steps) for meta in (saved, now)):
            raise ValueError(
                f"hato.meta_learning was {saved} in the checkpoint and is {now}: step {self.global_steps} lies within "
                "an episode; leave it as it was, or resume from a checkpoint where an episode ends both ways"
            )


def _is_open(meta: dict, steps_done: int) -> bool:
    """Whether `hato.meta_learning` with these values is within an episode."""
    return meta["enable"] and steps_done % episode_length(meta["method"], meta["n_inner_steps"]) > 0


def _tokens_of(one: SearchedTree) -> int:
    """Generated for a tree, merged siblings included."""
    return sum(node.count * node.n_tokens for node in one.tree.nodes)
