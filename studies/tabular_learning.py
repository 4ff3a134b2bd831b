"""A tabular policy that learns from trees: values that guide the search, and the loop of drawing, credit and update.

Shapes: P prompts, R rows of a prompt, B rows of all prompts, K decisions, S states, A actions. A set is the prompts of
one seed and one learning rate; all sets are drawn and trained together.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch
from verl.trainer.ppo.core_algos import get_adv_estimator_fn

from recipe.hato.credit import HATO_SETTINGS
from recipe.hato.keys import HATOConfig, RewardWeights
from studies.tabular_trees import ACTIONS, Drawing, Guide, N, Rows, Task, generated, trained
from verl.trainer.ppo.credit.nodes import SEGMENT_IDS

EXACT, NOISY, LEARNT, LEARNT_TOGETHER = "exact", "noisy", "learnt", "learnt together"
NOISE = 0.5  # standard deviation of a noisy value's error, where the best value is 1
MEAN = HATOConfig(path_reward="mean", reward_weights=RewardWeights(alpha=0.0, beta=1.0, gamma=0.0))
Grower = Callable[[Drawing, Guide | None], Rows]


def advantages_of(credit: str, scores: torch.Tensor, groups: np.ndarray, nodes: torch.Tensor) -> torch.Tensor:
    """Return the advantages (B, K) of the estimator that is registered as `credit`.

    Args:
        scores: outcomes (B,).
        groups: number of each row's prompt (B,).
        nodes: nodes of the rows (B, K), equal where rows share a decision; -1 after the end of a shorter row.
    """
    rewards = torch.zeros(nodes.shape)
    rewards[:, -1] = scores
    name, _, variant = credit.partition(", ")
    with ExitStack() as stack:
        stack.enter_context(SEGMENT_IDS.bound(nodes))
        stack.enter_context(HATO_SETTINGS.bound(MEAN if variant else HATOConfig()))
        return get_adv_estimator_fn(name)(rewards, (nodes >= 0).float(), groups)[0]


def values_of(task: Task, probs: np.ndarray) -> np.ndarray:
    """Return the chance (P, K + 1, S) of a right answer from each state, before each decision and at the end."""
    states, actions = np.arange(task.n_states), np.arange(ACTIONS)
    after = np.minimum(task.after(states[:, None], actions), task.n_states - 1)
    values = np.empty((len(probs), task.length + 1, task.n_states))
    values[:, -1] = task.is_right(states)
    for at in reversed(range(task.length)):
        values[:, at] = (probs[:, at, task.seen(states)] * values[:, at + 1][:, after]).sum(-1)
    return values


def exact_guide(drawing: Drawing, noise: float = 0.0) -> Guide:
    """Return a function from rows and a depth to the values (P, R) of the rows' prefixes of this depth.

    A value is the exact chance of a right answer, divided by the best one at this depth, plus noise of this standard
    deviation.
    """
    values = values_of(drawing.task, drawing.probs)
    for at in range(drawing.task.length):  # ignores the values of states that no path reaches
        values[:, at, (ACTIONS - 1) * at + 1 if drawing.task.target is not None else 2 :] = 0
    shares = values / values.max(-1, keepdims=True).clip(1e-12)

    def guide(rows: Rows, at: int) -> np.ndarray:
        row_shares = shares[drawing.prompts, at, rows.states[..., at]]
        return row_shares + noise * drawing.rng.standard_normal(row_shares.shape)

    return guide


class LearntValue:
    """Values that are learned: running means of the outcomes of rows, for each action of each decision.

    Each mean is divided by the largest one of its decision, and a prefix's value is the product over its decisions.
    With a target there is a mean for each state instead, and a prefix's value is that of its last state. Before the
    first right answer, all values are equal.
    """

    KEPT, PRIOR = 0.9, 4.0  # weight of older outcomes after each step; number of prior outcomes with the mean of all

    def __init__(self, task: Task, prompts: int, shared_by: int = 1):
        """Start without any outcome; groups of `shared_by` consecutive prompts learn one value together."""
        self.task, self.shared_by = task, shared_by
        n = ACTIONS if task.target is None else task.n_states
        self.right, self.seen = np.zeros((2, prompts, task.length, n))

    def _keys(self, rows: Rows) -> np.ndarray:
        """Return the keys (P, R, K) of the running means: actions, or with a target the states after them."""
        return rows.actions if self.task.target is None else rows.states[..., 1:]

    def update(self, rows: Rows, outcomes: np.ndarray) -> None:
        """Add the outcomes (P, R) of complete rows to the running means; incomplete rows have none and are left out."""
        complete, keys = rows.lengths == self.task.length, self._keys(rows)
        prompts, _, decisions = np.ogrid[: keys.shape[0], :1, : keys.shape[2]]
        index = np.ravel_multi_index(np.broadcast_arrays(prompts, decisions, keys.clip(0)), self.seen.shape)[complete]
        for sums, added in ((self.right, outcomes[complete]), (self.seen, np.ones(complete.sum()))):
            weights = np.repeat(added, keys.shape[2])
            sums *= self.KEPT
            sums += np.bincount(index.ravel(), weights, sums.size).reshape(sums.shape)

    def guide(self, rows: Rows, at: int) -> np.ndarray:
        """Return the values (P, R) of the rows' prefixes of `at` decisions."""

        def shared(sums: np.ndarray) -> np.ndarray:
            groups = sums.reshape(-1, self.shared_by, *sums.shape[1:]).sum(1)
            return groups.repeat(self.shared_by, 0)

        right, seen = shared(self.right), shared(self.seen)
        mean = right.sum(-1, keepdims=True) / seen.sum(-1, keepdims=True).clip(1e-12)
        means = (right + self.PRIOR * mean) / (seen + self.PRIOR)
        shares = means / means.max(-1, keepdims=True).clip(1e-12)
        shares[right.sum(-1) < 0.5] = 1.0
        prompts, decisions = np.arange(len(shares))[:, None, None], np.arange(at)
        values = shares[prompts, decisions, self._keys(rows)[..., :at].clip(0)]
        return values.prod(-1) if self.task.target is None else values[..., -1]


@dataclass(frozen=True)
class Method:
    """A way to draw decisions and train on them.

    Args:
        name: name in tables and pictures.
        grow: function of a drawing and a guide that returns rows.
        credits: names of estimators; the best one is used.
        value: kind of value that guides the drawing; None: no guide.
        trains_dropped: whether dropped prefixes are trained, as wrong answers.
        rounds: largest number of drawings for one update. A prompt is drawn again while its answers are all right or
            all wrong, and the update waits for it; 1: no prompt is drawn again.
        counted: share of the decisions that count as generated; a share below 1 is impossible in practice.
    """

    name: str
    grow: Grower
    credits: tuple[str, ...] = ("grpo_vectorized", "treerl")
    value: str | None = None
    trains_dropped: bool = False
    rounds: int = 1
    counted: float = 1.0

    def memory(self, task: Task, sets: int, prompts: int) -> LearntValue | None:
        if self.value not in (LEARNT, LEARNT_TOGETHER):
            return None
        return LearntValue(task, sets * prompts, prompts if self.value == LEARNT_TOGETHER else 1)

    def guide(self, drawing: Drawing, memory: LearntValue | None) -> Guide | None:
        if self.value is None:
            return None
        return memory.guide if memory else exact_guide(drawing, NOISE if self.value == NOISY else 0.0)


@dataclass
class Curves:
    """Arrays (updates + 1, sets): accuracy, and a prompt's mean number of decisions generated and trained so far.

    A prompt whose answers are all right or all wrong is not trained: its advantages are 0.
    """

    accuracy: np.ndarray
    generated: np.ndarray
    trained: np.ndarray

    def at(self, axis: str, decisions: np.ndarray) -> np.ndarray:
        """Return the accuracy (sets, points) after these (sets, points) decisions `generated` or `trained`."""
        sets = zip(decisions, getattr(self, axis).T, self.accuracy.T, strict=True)
        return np.stack([np.interp(points, counts, accuracy) for points, counts, accuracy in sets])

    def area(self, axis: str, end: np.ndarray, points: int = 200) -> np.ndarray:
        """Return the mean accuracy (sets,) while the decisions go from 0 to `end` (sets,)."""
        return self.at(axis, end[:, None] * np.linspace(0, 1, points)).mean(1)


def softmax(logits: np.ndarray) -> np.ndarray:
    """Return the softmax over the last axis."""
    exponents = np.exp(logits - logits.max(-1, keepdims=True))
    return exponents / exponents.sum(-1, keepdims=True)


def gradient_of(drawing: Drawing, rows: Rows, outcomes: np.ndarray, used: np.ndarray, credit: str) -> np.ndarray:
    """Return the gradient (P, K, seen states, A) of (sum of advantage x log-probability) / N over the rows in `used`.

    Args:
        used: mask of the rows (P, R).
    """
    prompt, row = used.nonzero()
    actions, nodes = rows.actions[prompt, row], rows.nodes[prompt, row]
    scores = torch.from_numpy(outcomes[prompt, row]).float()
    advantages = advantages_of(credit, scores, prompt, torch.from_numpy(nodes)).double().numpy()
    decisions, states = np.arange(actions.shape[1]), drawing.task.seen(rows.states[prompt, row, :-1])
    where = np.broadcast_arrays(prompt[:, None], decisions, states, actions)
    drawn = actions >= 0
    index = np.ravel_multi_index([x[drawn] for x in where], drawing.probs.shape)
    sums = np.bincount(index, advantages[drawn], drawing.probs.size).reshape(drawing.probs.shape)
    return (sums - sums.sum(-1, keepdims=True) * drawing.probs) / N


def bounded(change: np.ndarray, largest: float) -> np.ndarray:
    """Return the change of logits (P, …), scaled down for each prompt so that none moves by more than `largest`."""
    most = np.abs(change).max(tuple(range(1, change.ndim)), keepdims=True)
    return change / np.maximum(most / largest, 1)


class Updates:
    """Collects gradients. A set's update is due when all its prompts have one, or after `most_rounds` drawings."""

    def __init__(self, shape: tuple[int, ...], sets: int, most_rounds: int):
        self.gradient, self.waits = np.zeros(shape), np.ones(shape[0], bool)
        self.rounds, self.most_rounds = np.zeros(sets, int), most_rounds

    def add(self, gradient: np.ndarray, outcomes_differ: np.ndarray) -> np.ndarray:
        """Store gradients (P, …) of prompts that have none and whose outcomes differ; return these prompts' mask."""
        ready = self.waits & outcomes_differ
        self.gradient[ready] = gradient[ready]
        self.waits, self.rounds = self.waits & ~ready, self.rounds + 1
        return ready

    def take(self) -> np.ndarray:
        """Return and clear the gradients of the sets whose update is due; other sets get 0."""
        due = ~self.waits.reshape(len(self.rounds), -1).any(1) | (self.rounds >= self.most_rounds)
        due_prompts = due.repeat(len(self.waits) // len(due))
        taken = np.where(due_prompts.reshape(-1, *[1] * (self.gradient.ndim - 1)), self.gradient, 0)
        self.gradient[due_prompts], self.waits[due_prompts], self.rounds[due] = 0, True, 0
        return taken


def learn(
    task: Task,
    method: Method,
    credit: str,
    rates: np.ndarray,
    first: np.ndarray,
    seed: int,
    steps: int,
    flipped: float,
    largest_change: float = np.inf,
) -> Curves:
    """Train until `steps` x N x K decisions are generated for a prompt, in all sets, and return the curves.

    Args:
        rates: learning rates (sets,).
        first: first logits (sets, prompts of a set, K, seen states, A).
        flipped: share of the verdicts that are wrong.
        largest_change: largest change of a logit by one update.
    """
    (sets, prompts), rng, budget = first.shape[:2], np.random.default_rng(seed), steps * N * task.length
    logits = first.reshape(-1, *first.shape[2:])
    step = rates.repeat(prompts)[:, None, None, None]
    memory, updates = method.memory(task, sets, prompts), Updates(logits.shape, sets, method.rounds)
    counts, curve = np.zeros((2, sets)), []
    while True:
        probs = softmax(logits)
        curve.append((values_of(task, probs)[:, 0, 0].reshape(sets, -1).mean(1), *counts))
        if counts[0].min() >= budget - 0.5:
            return Curves(*(np.array(values) for values in zip(*curve, strict=True)))
        drawing = Drawing(task, probs, rng, done=counts[0].mean() / budget)
        rows = method.grow(drawing, method.guide(drawing, memory))
        lengths = rows.lengths
        complete = lengths == task.length
        outcomes = complete & (task.is_right(rows.states[..., -1]) ^ (rng.random(lengths.shape) < flipped))
        used = lengths > 0 if method.trains_dropped else complete
        if memory:
            memory.update(rows, outcomes)
        drawn_for, differ = updates.waits, (outcomes & used).any(1) & (~outcomes & used).any(1)
        trains = updates.add(gradient_of(drawing, rows, outcomes, used, credit), differ)
        new = method.counted * generated(rows) * drawn_for, trained(rows.without(~used)) * trains
        counts = counts + np.reshape(new, (2, sets, -1)).mean(-1)
        logits = logits + bounded(step * updates.take(), largest_change)
