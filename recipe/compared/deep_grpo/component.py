"""DEEP-GRPO in the trainer: fits the probability that some branch of a pivot is right, by the pivot's position."""

from collections import deque
from collections.abc import Iterable
from statistics import fmean

import numpy as np
from omegaconf import DictConfig

from recipe.compared.deep_grpo.tree import PIVOTS, Fit, Pivots, Policy
from verl.trainer.ppo.v1.batch_rows import BatchRows
from verl.trainer.ppo.v1.component import Component, tree_of
from verl.utils.parts import register_component
from verl.workers.rollout.prompt_task import PromptSettings


def fit_success(pivots: Iterable[tuple[float, bool]]) -> Fit | None:
    """Return a logistic regression on (position, some branch right); None for at most ten pivots, or if all outcomes
    are equal.

    It uses Newton's method with half the squared slope as a penalty (scikit-learn's default), without which outcomes
    that a position separates would have no finite slope.
    """
    positions, right = np.array(list(pivots), dtype=float).reshape(-1, 2).T
    if len(right) <= 10 or len(set(right)) < 2:
        return None
    features, weights, penalty = np.stack([np.ones_like(positions), positions]), np.zeros(2), np.diag([0.0, 1.0])
    for _ in range(100):
        p = 1 / (1 + np.exp(-weights @ features))
        hessian = features * (p * (1 - p)) @ features.T + penalty
        change = np.linalg.solve(hessian, features @ (p - right) + penalty @ weights)
        weights = weights - change
        if np.abs(change).max() < 1e-9:
            break
    return Fit(float(weights[0]), float(weights[1]))


@register_component
class PivotSuccess(Component):
    """Component that fits P, the probability that some branch of a pivot is right, after each step to the last `window`
    pivots in the order of the data. Its state consists of the positions and outcomes of these pivots."""

    state_file = "deep_grpo.json"

    def __init__(self, config: DictConfig):
        super().__init__(config)
        self.keys = Policy.part.read(config)
        self.pivots: deque[tuple[float, bool]] = deque(maxlen=self.keys.window)
        self.fit: Fit | None = None
        self.dropped: list[tuple] = []  # `_outcomes` of the groups dropped since the last batch

    @classmethod
    def is_needed(cls, config: DictConfig) -> bool:
        return tree_of(config) == "deep_grpo"

    def step_settings(self, trainer) -> PromptSettings:
        return PromptSettings(tree=(self.fit,) if self.fit else ())

    def on_drop(self, rows: BatchRows) -> None:
        self.dropped += self._outcomes(rows)

    def after_advantage(self, rows: BatchRows, metrics: dict) -> None:
        new = [pivot for _, pivots in sorted([*self.dropped, *self._outcomes(rows)]) for pivot in pivots]
        self.dropped = []
        self.pivots.extend(new)
        self.fit = fit_success(self.pivots)
        metrics["deep_grpo/pivots"] = len(new)
        if new:
            metrics["deep_grpo/pivot_position"], metrics["deep_grpo/pivot_success"] = map(fmean, zip(*new, strict=True))
        if self.fit:
            metrics["deep_grpo/success_intercept"], metrics["deep_grpo/success_slope"] = self.fit

    def _outcomes(self, rows: BatchRows) -> list[tuple[tuple[int, int], list[tuple[float, bool]]]]:
        """Return each prompt's place in the data, and the position of each pivot with whether a branch is right."""
        pivots, right = rows.tokens(PIVOTS.name, 0).amax(1), rows.rewards.sum(-1) > self.keys.failure_threshold
        outcomes = []
        for group in rows.groups:
            positions = rows.tree_data(group, Pivots).positions
            successful = set(pivots[group.rows][right[group.rows]].tolist())
            outcomes.append((group.order, [(x, number in successful) for number, x in positions]))
        return outcomes

    def state_dict(self) -> dict:
        return {"pivots": list(self.pivots)}

    def load_state_dict(self, state: dict) -> None:
        self.pivots = deque(((x, right) for x, right in state["pivots"]), maxlen=self.keys.window)
        self.fit = fit_success(self.pivots)
