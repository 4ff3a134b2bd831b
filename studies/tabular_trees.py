"""Trees of a tabular policy's decisions, drawn for many prompts at once.

Shapes: P prompts, R rows (the paths of a prompt), K decisions of an answer, S states, A actions. Every grower draws
`N` x K decisions for each prompt, unless its docstring says otherwise; tabular_learning.py trains on them.

    independent   N answers
    greedy        the most likely answer, and N - 1 independent ones
    forks         2 answers, then forks of them at random places or at the decisions with the highest entropy
    latr          branches at second most likely actions; the decisions that this saves go to ordinary answers
    levels        HATO's search: after each third, a value may drop prefixes, and the rest are continued
    half_guided   N / 2 independent answers, and a search of `levels` for the other half
    stopped       no tree: answers stop after a third where the value would drop them, so that more can begin
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

ACTIONS, N, RIGHT = 4, 8, 0
KEPT_FROM = 0.5  # smallest value of a prefix that is kept, as a share of the best value at its depth
TOP_ENTROPIES = 2  # number of decisions of an answer at which `entropy_forks` forks
Guide = Callable[["Rows", int], np.ndarray]


@dataclass(frozen=True)
class Task:
    """K decisions in a row. An answer is right when all are `RIGHT`, or, with a target, when the actions add up to it.

    Args:
        length: number of decisions, K.
        target: sum of a right answer's actions. The policy then sees the sum so far, and can repair a wrong step.
        sees_errors: whether the policy, without a target, has other probabilities after an error.
    """

    length: int
    target: int | None = None
    sees_errors: bool = False

    @property
    def n_states(self) -> int:
        return 2 if self.target is None else (ACTIONS - 1) * self.length + 1

    def after(self, states: np.ndarray, actions: np.ndarray) -> np.ndarray:
        """Return the states after the actions: with a target the sum so far, otherwise 1 after an error, else 0."""
        return states | (actions != RIGHT) if self.target is None else states + actions

    def seen(self, states: np.ndarray) -> np.ndarray:
        """Return the states as the policy sees them: all 0 where it sees neither a sum nor errors."""
        return states if self.target is not None or self.sees_errors else states * 0

    @property
    def n_seen(self) -> int:
        return self.n_states if self.target is not None or self.sees_errors else 1

    def is_right(self, states: np.ndarray) -> np.ndarray:
        return states == (self.target or 0)


@dataclass
class Rows:
    """Actions and nodes (P, R, K), and the states (P, R, K + 1) before each decision and at the end.

    Actions and nodes are -1 where nothing was drawn. Equal nodes of a prompt are one decision that rows share.
    """

    actions: np.ndarray
    nodes: np.ndarray
    states: np.ndarray

    @classmethod
    def empty(cls, prompts: int, rows: int, length: int) -> "Rows":
        shape = prompts, rows, length
        return cls(np.full(shape, -1), np.full(shape, -1), np.zeros((prompts, rows, length + 1), int))

    @property
    def lengths(self) -> np.ndarray:
        """Return the number of decisions (P, R) of each row; 0: the row does not exist."""
        return (self.actions >= 0).sum(-1)

    def picked(self, rows: np.ndarray) -> "Rows":
        """Return copies of the rows whose indices are `rows` (P, R')."""
        return Rows(*(np.take_along_axis(x, rows[..., None], 1) for x in (self.actions, self.nodes, self.states)))

    def without(self, rows: np.ndarray) -> "Rows":
        """Return the same rows, with those of the mask `rows` (P, R) emptied."""
        return Rows(*(np.where(rows[..., None], -1, x) for x in (self.actions, self.nodes)), self.states)

    def joined(self, *others: "Rows") -> "Rows":
        every = (self, *others)
        return Rows(*(np.concatenate([getattr(x, name) for x in every], 1) for name in ("actions", "nodes", "states")))


def distinct(codes: np.ndarray) -> np.ndarray:
    """Return for each prompt (P,) the number of distinct codes (P, R) of at least 0."""
    codes = np.sort(codes, 1)
    return (codes[:, :1] >= 0).sum(1) + ((codes[:, 1:] != codes[:, :-1]) & (codes[:, 1:] >= 0)).sum(1)


def generated(rows: Rows) -> np.ndarray:
    """Return the number of drawn decisions (P,)."""
    return sum(distinct(rows.nodes[..., at]) for at in range(rows.nodes.shape[-1]))


def trained(rows: Rows) -> np.ndarray:
    """Return the number of decisions (P,) on the prefix tree, where all rows with equal first actions share them."""
    total, codes = np.zeros(len(rows.actions), int), np.zeros(rows.actions.shape[:2], int)
    for at in range(rows.actions.shape[-1]):
        actions = rows.actions[..., at]
        codes = np.where((actions < 0) | (codes < 0), -1, codes * ACTIONS + actions)
        total += distinct(codes)
    return total


class Drawing:
    """The drawing of one step's decisions.

    Args:
        probs: the policy's probabilities (P, K, seen states, A).
        done: share of the run that is over.
    """

    def __init__(self, task: Task, probs: np.ndarray, rng: np.random.Generator, done: float = 0.0):
        self.task, self.probs, self.rng, self.done = task, probs, rng, done
        self.prompts = np.arange(len(probs))[:, None]
        self._cumulative, self._rows_drawn = probs.cumsum(-1), 0

    def empty(self, rows: int) -> Rows:
        return Rows.empty(len(self.probs), rows, self.task.length)

    def probs_at(self, rows: Rows, at: int) -> np.ndarray:
        """Return the policy's probabilities (P, R, A) at decision `at`."""
        return self.probs[self.prompts, at, self.task.seen(rows.states[..., at])]

    def draw(self, rows: Rows, begin: np.ndarray | int, end: int) -> Rows:
        """Draw each row's decisions from `begin` (P, R) to `end`, in place, and return the rows."""
        begin = np.broadcast_to(begin, rows.actions.shape[:2])
        for at in range(begin.min(), end):
            cumulative = self._cumulative[self.prompts, at, self.task.seen(rows.states[..., at])]
            actions = (self.rng.random((*begin.shape, 1)) > cumulative[..., :-1]).sum(-1)
            self.take(rows, at, actions, begin <= at)
        return self.close(rows)

    def take(self, rows: Rows, at: int, actions: np.ndarray, where: np.ndarray) -> None:
        """Set decision number `at` to these actions, with new nodes, in the rows of the mask `where` (P, R)."""
        numbers = (self._rows_drawn + np.arange(where.shape[1])) * self.task.length + at
        rows.actions[..., at] = np.where(where, actions, rows.actions[..., at])
        rows.nodes[..., at] = np.where(where, numbers, rows.nodes[..., at])
        states = rows.states[..., at]
        rows.states[..., at + 1] = np.where(
            rows.actions[..., at] < 0, states, self.task.after(states, rows.actions[..., at])
        )

    def close(self, rows: Rows) -> Rows:
        """Return the rows. Decisions that are drawn later get other node numbers, and so share no node with them."""
        self._rows_drawn += rows.actions.shape[1]
        return rows

    def fill(self, rows: Rows, choose: Callable[[Rows, int], tuple[np.ndarray, np.ndarray]]) -> Rows:
        """Add forks of the rows until N x K decisions are drawn; the last fork begins late enough not to exceed them.

        Args:
            choose: function of the rows and the fork's number; it returns (P,) rows and (P,) decisions to fork at.
        """
        length, left, number = self.task.length, N * self.task.length - generated(rows), 0
        while (left > 0).any():
            source, start = choose(rows, number)
            start = np.maximum(start, length - left)
            fork = self.draw(rows.picked(source[:, None]), start[:, None], length)
            rows, left, number = rows.joined(fork.without(left[:, None] <= 0)), left - (length - start), number + 1
        return rows


def independent(drawing: Drawing, guide: Guide | None = None, answers: int = N) -> Rows:
    return drawing.draw(drawing.empty(answers), 0, drawing.task.length)


def greedy(drawing: Drawing, guide: Guide | None = None) -> Rows:
    first = drawing.empty(1)
    for at in range(drawing.task.length):
        drawing.take(first, at, drawing.probs_at(first, at).argmax(-1), np.array([[True]]))
    drawing.close(first)
    return first.joined(independent(drawing, answers=N - 1))


def random_forks(drawing: Drawing, guide: Guide | None = None) -> Rows:
    def choose(rows: Rows, number: int) -> tuple[np.ndarray, np.ndarray]:
        prompts, n, _ = rows.actions.shape
        return drawing.rng.integers(n, size=prompts), drawing.rng.integers(drawing.task.length, size=prompts)

    return drawing.fill(independent(drawing, answers=2), choose)


def entropy_forks(drawing: Drawing, guide: Guide | None = None) -> Rows:
    def choose(rows: Rows, number: int) -> tuple[np.ndarray, np.ndarray]:
        probs = np.stack([drawing.probs_at(rows, at)[:, number % 2] for at in range(drawing.task.length)], 1)
        entropies = -(probs * np.log(probs.clip(1e-12))).sum(-1) + 1e-6 * drawing.rng.random(probs.shape[:2])
        order = entropies.argsort(-1)[:, ::-1]
        rank = (number // 2) % min(TOP_ENTROPIES, drawing.task.length)
        return np.full(len(order), number % 2), order[:, rank]

    return drawing.fill(independent(drawing, answers=2), choose)


def latr(drawing: Drawing, absolute: float, relative: float, branches: int) -> Rows:
    """Open a branch where the second most likely action is likely enough, up to `branches` of them.

    Its probability must be above `absolute`, and less than `relative` below the most likely action's. Branches take the
    most likely action until a prompt has all `branches`; from then on its actions are sampled. Decisions that are left
    of N x K go to ordinary answers.
    """
    if not branches:
        return independent(drawing)
    rows, used = drawing.empty(branches), np.ones((len(drawing.probs), 1), int)
    slots = np.arange(branches)
    for at in range(drawing.task.length):
        live, full = slots < used, used == branches
        probs = drawing.probs_at(rows, at)
        ranked = np.argsort(-probs, -1, kind="stable")[..., :2]
        first, second = np.moveaxis(np.take_along_axis(probs, ranked, -1), -1, 0)
        opens = live & (second > absolute) & (first - second < relative)
        slot = used + opens.cumsum(1) - 1
        opens &= slot < branches
        sampled = (drawing.rng.random((*live.shape, 1)) > probs.cumsum(-1)[..., :-1]).sum(-1)
        actions = np.where(full, sampled, ranked[..., 0])
        prompt, parent = opens.nonzero()
        child = slot[prompt, parent]
        for values in (rows.actions, rows.nodes, rows.states):
            values[prompt, child] = values[prompt, parent]
        actions[prompt, child] = ranked[prompt, parent, 1]
        used = used + opens.sum(1, keepdims=True)
        drawing.take(rows, at, actions, slots < used)
    drawing.close(rows)
    zeros = np.zeros(len(drawing.probs), int)
    return drawing.fill(rows, lambda rows, number: (zeros, zeros))


def level_ends(length: int) -> list[int]:
    """Return the number of decisions at the end of each level, a third of K: [2, 4, 6] for 6; [1, 2] for 2."""
    return np.cumsum([len(part) for part in np.array_split(np.arange(length), min(3, length))]).tolist()


def spread(length: int) -> Sequence[int]:
    """Return the number of prefixes after each level of a tree that forks at every prefix, such as (2, 6, 16).

    If the levels have equal lengths, these are N x K decisions.
    """
    return {1: (N,), 2: (N // 2, 3 * N // 2), 3: (N // 4, 3 * N // 4, 2 * N)}[len(level_ends(length))]


def straight(length: int, ends: int = N) -> list[int]:
    """Return the same number of prefixes after each level: without a guide these are independent answers."""
    return [ends] * len(level_ends(length))


def levels(drawing: Drawing, guide: Guide | None = None, ends: Callable[[int], Sequence[int]] = straight) -> Rows:
    """Draw level by level. After each, a guide's prefixes with values below KEPT_FROM are dropped.

    The others are continued until the next level. If all of a prompt's prefixes would be dropped, none is. Dropped
    prefixes, of fewer than K decisions, are the last rows.

    Args:
        ends: function of K that returns the number of prefixes after each level, which never decreases.
    """
    n_ends, dropped, start = ends(drawing.task.length), [], 0
    rows = drawing.empty(n_ends[0])
    for end, n in zip(level_ends(drawing.task.length), n_ends, strict=True):
        if start:
            keep = np.ones(rows.actions.shape[:2], bool) if guide is None else guide(rows, start) >= KEPT_FROM
            keep |= ~keep.any(1, keepdims=True)
            dropped.append(rows.without(keep))
            order = np.argsort(drawing.rng.random(keep.shape) + ~keep, 1)
            rows = rows.picked(np.take_along_axis(order, np.arange(n) % keep.sum(1, keepdims=True), 1))
        rows, start = drawing.draw(rows, start, end), end
    return rows.joined(*dropped)


def half_guided(drawing: Drawing, guide: Guide) -> Rows:
    half = N // 2
    return independent(drawing, answers=half).joined(levels(drawing, guide, lambda length: straight(length, half)))


def stopped(drawing: Drawing, guide: Guide) -> Rows:
    """Begin answers while fewer than N x K decisions are drawn, so that the last answer may exceed this number."""
    *checked, length = level_ends(drawing.task.length)
    shortest = checked[0] if checked else length
    rows = independent(drawing, answers=-(-N * length // shortest))
    for at in checked:
        lost = (guide(rows, at) < KEPT_FROM) & (rows.lengths >= at)
        for values in (rows.actions, rows.nodes):
            values[..., at:] = np.where(lost[..., None], -1, values[..., at:])
    return rows.without(rows.lengths.cumsum(1) - rows.lengths >= N * length)
