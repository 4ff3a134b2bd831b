"""HATO's components of a training step: step rewards, a search that learns, and the diversity of right paths.

HATOCredit       with adv_estimator=hato, on any trees, and with HATO's trees, whatever the estimator
HATOSearch       with HATO's trees: the value model, the temperature, the number of nodes of a tree
SuccessfulPaths  with a section `hato`, on any trees
MetaLearning     with a section `hato.meta_learning` (meta_component.py)
"""

from collections.abc import Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch
from omegaconf import DictConfig

import recipe.hato.meta_component  # noqa: F401  # registers MetaLearning
from recipe.hato.credit import HATO_SETTINGS, PARTS, StepCredit, batch_credit, share_of_varying_groups, step_credit
from recipe.hato.keys import DRAWS, LOCAL_REWARDS, hato_keys
from recipe.hato.metrics import ReferencePaths, calibration_error, novelty, rdi
from recipe.hato.search import NodeBudget, temperature_at, ucb_grants
from recipe.hato.value_model import KeptSteps, SearchState, pack, value_model_of
from verl.trainer.ppo.credit.nodes import SEGMENT_IDS, tree_nodes
from verl.trainer.ppo.v1.batch_rows import BatchRows, Group
from verl.trainer.ppo.v1.component import Component, tree_of
from verl.utils.parts import register_component
from verl.utils.token_fields import ContextValue
from verl.workers.config.schedule import filters_groups
from verl.workers.rollout.prompt_task import PromptSettings
from verl.workers.rollout.trajectory_tree import DROPPED_STEPS, TREE_METRICS, TrajectoryTree, shown_prompts


def hato_credit(rows: BatchRows, config: DictConfig) -> StepCredit:
    """Return HATO's credit of the batch; with adv_estimator=hato this is what the estimator has already computed."""
    norm = config.algorithm.get("norm_adv_by_std_in_grpo", True)
    return batch_credit(rows.rewards, rows.response_mask, rows.index, norm_adv_by_std_in_grpo=norm)


@register_component
class HATOCredit(Component):
    """Component that gives the estimator its settings, and adds metrics and numbers for the viewer.

    With adv_estimator=hato and group filtering it leaves in the loss only the tokens of steps whose verified reward
    varies among their siblings, if there are any.
    """

    def __init__(self, config: DictConfig):
        super().__init__(config)
        self.hato = hato_keys(config)

    @classmethod
    def is_needed(cls, config: DictConfig) -> bool:
        return config.algorithm.adv_estimator == "hato" or tree_of(config) == "hato"

    def context_values(self) -> dict[ContextValue, Any]:
        return {HATO_SETTINGS: self.hato}

    def after_advantage(self, rows: BatchRows, metrics: dict) -> None:
        credit, mask = hato_credit(rows, self.config), rows.response_mask
        by_the_model = credit.nodes.at_first_token(mask) > 0
        for name in PARTS:
            part = getattr(credit, name)
            metrics[f"hato/reward_{name}"] = _mean_over_trees(part[by_the_model], credit.nodes.group[by_the_model])
        if filters_groups(self.config) and self.config.algorithm.adv_estimator == "hato":
            kept = mask * credit.varies
            for group in rows.groups:  # an update without a token would have the loss 0 / 0
                if not kept[group.rows].any():
                    kept[group.rows] = mask[group.rows]
            # Upstream's loss divides by the number of tokens in loss_mask.
            for name in ("response_mask", "loss_mask"):
                rows.put(name, kept)

    def annotate(self, tree: TrajectoryTree, rows: BatchRows, group: Group) -> None:
        credit = hato_credit(rows, self.config)
        nodes = credit.nodes.segment_nodes(group.uid, range(len(tree.segments)))
        for segment, node in zip(tree.segments, nodes, strict=True):
            if node >= 0:
                segment.info.notes |= {f"R_{name}": getattr(credit, name)[node].item() for name in PARTS}


def _mean_over_trees(node_rewards: torch.Tensor, trees: torch.Tensor) -> float:
    """Return the mean over trees of the mean over each tree's nodes; 0 without nodes."""
    if not len(node_rewards):
        return 0.0
    n_nodes = trees.bincount()
    return (trees.bincount(node_rewards) / n_nodes)[n_nodes > 0].mean().item()


class Visit(NamedTuple):
    """The results of one tree, from which the search learns; `order` and `problem` are the group's.

    Args:
        features, values: the value model's input and output for each step, from when the step was drawn.
        right: share of right answers below each step; a dropped path has no answer and does not count.
        accuracy: share of right answers of the whole tree.
        varying: share of the tree's sibling groups whose verified rewards differ.
    """

    order: tuple[int, int]
    problem: str
    features: list[list[float]]
    values: list[float]
    right: list[float]
    accuracy: float
    varying: float
    tokens: float


def visits_of(rows: BatchRows, credit: StepCredit) -> list[Visit]:
    """Return the visit of each prompt group; raise ValueError if a tree came without its steps."""
    varying, visits = share_of_varying_groups(credit), []
    for group in rows.groups:
        estimates = rows.tree_data(group, KeptSteps).estimates
        number = int(np.searchsorted(credit.nodes.prompts, group.uid))
        nodes = credit.nodes.segment_nodes(group.uid, list(estimates))
        # A step that no row passes through has no answer.
        answered = [(step, node) for step, node in zip(estimates.values(), nodes, strict=True) if node >= 0]
        visits.append(
            Visit(
                order=group.order,
                problem=group.problem,
                features=[step.features for step, _ in answered],
                values=[step.value for step, _ in answered],
                right=credit.right[[node for _, node in answered]].tolist(),
                accuracy=credit.prompt_right[number].item(),
                varying=varying[number].item(),
                tokens=rows.column("extra_fields", group.rows[:1])[0][TREE_METRICS]["tokens_generated"],
            )
        )
    return visits


@register_component
class HATOSearch(Component):
    """The value model, which learns from every tree, and the settings that prompts carry to the search.

    Its state is the value model and, for each problem, the number of steps of its trees so far and the share of varying
    sibling groups in its last tree.
    """

    state_file = "hato.pt"

    def __init__(self, config: DictConfig):
        super().__init__(config)
        self.hato = hato_keys(config)
        self.value_model = value_model_of(self.hato, config.actor_rollout_ref.rollout.seed)
        self.record: dict[str, tuple[int, float]] = {}
        self.temperature = config.actor_rollout_ref.rollout.temperature
        self.dropped: list[Visit] = []  # trees dropped since the last batch
        self._packed: bytes | None = None  # the current value model, serialized
        self.n_learnt = 0  # number of batches learnt from in this run: one per update; a step may have several

    @classmethod
    def is_needed(cls, config: DictConfig) -> bool:
        return tree_of(config) == "hato"

    def step_settings(self, trainer) -> PromptSettings:
        progress = (trainer.global_steps - 1) / trainer.total_training_steps
        self.temperature = temperature_at(progress, self.hato.exploration)
        # The loss must see the same policy as the sampler.
        trainer.set_temperature(self.temperature)
        if self._packed is None:
            state = self.value_model.state_dict()
            self._packed = pack({name: value for name, value in state.items() if name != "optimizer"})
        return PromptSettings(tree=(SearchState(self.n_learnt, self.temperature, self._packed),))

    def prompt_settings(self, problems: Sequence[str]) -> Sequence[PromptSettings] | None:
        if not self.hato.exploration.nodes_per_tree:
            return None
        return [PromptSettings(tree=(NodeBudget(nodes),)) for nodes in self.shared_nodes(problems)]

    def shared_nodes(self, problems: Sequence[str]) -> list[int]:
        """Return the number of nodes of each problem's tree: `nodes_per_tree` on average, from 2 to `max_nodes`.

        A problem gets more nodes if more of its last tree's sibling groups varied, or if it had fewer steps so far than
        others (`ucb_grants`). Prompts that replace dropped ones get the average, so that a tree does not depend on the
        number of these prompts.
        """
        average, most = self.hato.exploration.nodes_per_tree, self.hato.tree.max_nodes
        if len(problems) < self.config.data.train_batch_size:
            return [min(average, most)] * len(problems)
        # A new problem counts as one whose sibling groups all vary.
        records = [self.record.get(problem, (0, 1.0)) for problem in problems]
        grants = ucb_grants(
            [varying for _, varying in records],
            [n_steps for n_steps, _ in records],
            budget=max(0, average - 2) * len(problems),
            coef=self.hato.exploration.ucb_coef,
            most=most - 2,
        )
        # A single step would have no sibling to be compared with.
        return [2 + grant for grant in grants]

    def on_drop(self, rows: BatchRows) -> None:
        ids, *fields = (rows.tokens(f.name, f.unsent) for f in (SEGMENT_IDS, LOCAL_REWARDS, DRAWS, DROPPED_STEPS))
        nodes = tree_nodes(ids, rows.index, rows.response_mask)
        self.dropped += visits_of(rows, step_credit(nodes, rows.rewards.sum(-1), self.hato, *fields))

    def after_advantage(self, rows: BatchRows, metrics: dict) -> None:
        kept = visits_of(rows, hato_credit(rows, self.config))
        dropped, self.dropped = self.dropped, []
        metrics |= {"hato/trees_kept": len(kept), "hato/trees_dropped": len(dropped)}
        metrics["tree/tokens_generated"] += sum(visit.tokens for visit in dropped) / len(kept)
        metrics["hato/temperature"] = self.temperature
        if self.hato.tree.train_dropped:
            answers = [row for row in rows.real if rows.has_answer[row]]
            metrics["hato/answer_score"] = rows.rewards.sum(-1)[answers].mean().item()
        visits = sorted([*kept, *dropped])
        metrics["hato/accuracy"] = fmean(visit.accuracy for visit in visits)
        names = "features", "values", "right"
        features, values, right = ([x for visit in visits for x in getattr(visit, name)] for name in names)
        metrics["hato/value_calibration_error"] = calibration_error(values, right)
        self.value_model.observe(features, right)
        self._packed, self.n_learnt = None, self.n_learnt + 1
        for visit in visits:
            n_steps, _ = self.record.pop(visit.problem, (0, 0.0))
            self.record[visit.problem] = (n_steps + len(visit.features), visit.varying)
        for problem in list(self.record)[: -self.hato.memory.problems]:
            del self.record[problem]

    def state_dict(self) -> dict:
        record = {problem: list(values) for problem, values in self.record.items()}
        model = {"value_model": self.value_model.state_dict(), "uncertainty": asdict(self.hato.uncertainty)}
        return model | {"record": record}

    def load_state_dict(self, state: dict) -> None:
        """Restore the state; raise ValueError if the checkpoint's value model has another shape."""
        saved, now = state["uncertainty"], asdict(self.hato.uncertainty)
        for name in ("method", "n_models", "n_passes", "model_config"):
            if saved[name] != now[name]:
                raise ValueError(
                    f"hato.uncertainty.{name} was {saved[name]} in the checkpoint and is {now[name]}: a value model of "
                    "another shape cannot go on; leave it as it was, or start anew"
                )
        self.value_model.load_state_dict(state["value_model"])
        self.record = {problem: tuple(values) for problem, values in state["record"].items()}
        self._packed = None


@register_component
class SuccessfulPaths(Component):
    """The difference of right answers from each other (RDI), and from their problem's first paths (novelty), which are
    its state."""

    state_file = "hato_paths.pt"

    def __init__(self, config: DictConfig):
        super().__init__(config)
        hato = hato_keys(config)
        self.threshold = hato.verification_threshold
        self.references = ReferencePaths(hato.memory.reference_prompts, hato.memory.reference_paths)
        self.first_visits: list[tuple[tuple[int, int], str, list[torch.Tensor]]] = []  # since the last batch

    @classmethod
    def is_needed(cls, config: DictConfig) -> bool:
        return bool(config.get("hato"))

    @classmethod
    def check(cls, config: DictConfig) -> None:
        hato_keys(config)

    def on_drop(self, rows: BatchRows) -> None:
        for group in rows.groups:
            if self.references.wants(group.problem):
                paths = rows.column("responses", rows.answers(group))
                self.first_visits.append((group.order, group.problem, paths))

    def after_advantage(self, rows: BatchRows, metrics: dict) -> None:
        shown = rows.groups[: shown_prompts(self.config)]
        is_right = (rows.rewards.sum(-1) > self.threshold).tolist()
        right_rows = [[row for row in group.rows if is_right[row]] for group in shown]
        right = [[path.tolist() for path in rows.column("responses", own)] for own in right_rows]
        distances = [rdi(sorted(set(map(tuple, paths)))) for paths in right]
        pairs = zip(shown, right, strict=True)
        novelties = [novelty(paths, self.references.of(group.problem)) for group, paths in pairs]
        for name, values in (("hato/rdi", distances), ("hato/novelty", novelties)):
            if values := [value for value in values if value is not None]:
                metrics[name] = fmean(values)
        self.on_drop(rows)
        for _, problem, paths in sorted(self.first_visits, key=lambda visit: visit[:2]):
            self.references.keep(problem, paths)
        self.first_visits = []

    def state_dict(self) -> dict:
        return self.references.state_dict()

    def load_state_dict(self, state: dict) -> None:
        self.references.load_state_dict(state)
