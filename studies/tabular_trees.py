"""Trees of decisions that a tabular policy takes, drawn for many prompts at once.

Shapes: P prompts, R rows (the paths of a prompt), K decisions of an answer, S states, A actions. Every grower draws
`N` x K decisions for each prompt, unless it says otherwise; tabular_learning.py trains on them.

    independent   N answers
    greedy        the most likely answer, and N - 1 independent ones
    forks         2 answers, then forks of them at random places or at the decisions with the highest entropy
    latr          the second most likely actions open branches, then ordinary answers for the decisions that were saved
    levels        HATO's search: after each third, a value may drop prefixes, and the rest are continued
    half_guided   N / 2 independent answers, and a search of `levels` for the other half
    stopped       no tree: answers, given up after a third where the value would drop them; more of them are begun
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

ACTIONS, N, RIGHT = 4, 8, 0
KEPT_FROM = 0.5  # a prefix is kept when its value is at least so much of the best value at its depth
TOP_ENTROPIES = 2  # of an answer so many decisions fork
Guide = Callable[["Rows", int], np.ndarray]


@dataclass(frozen=True)
class Task:
    """K decisions in a row. An answer is right when all are `RIGHT`, or, with a target, when the actions add up to it.

    Args:
        length: K.
        target: with it the policy sees the sum so far: a wrong step can be repaired, and many answers are right.
        sees_errors: without a target, whether the policy decides anew after an error, or as if there were none.
    """

    length: int
    target: int | None = None
    sees_errors: bool = False

    @property
    def n_states(self) -> int:
        return 2 if self.target is None else (ACTIONS - 1) * self.length + 1

    def after(self, states: np.ndarray, actions: np.ndarray) -> np.ndarray:
        """The states after the actions; without a target 0: all right so far, 1: not."""
        return states | (actions != RIGHT) if self.target is None else states + actions

    def seen(self, states: np.ndarray) -> np.ndarray:
        """What the policy knows of the states."""
        return states if self.target is not None or self.sees_errors else states * 0

    @property
    def n_seen(self) -> int:
        return self.n_states if self.target is not None or self.sees_errors else 1

    def is_right(self, states: np.ndarray) -> np.ndarray:
        return states == (self.target or 0)


@dataclass
class Rows:
    """Args:
    actions, nodes: (P, R, K), -1 where nothing was drawn; equal nodes of a prompt are one decision that rows share.
    states: (P, R, K + 1) before each decision and at the end.
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
        """(P, R) decisions of each row; 0: there is no such row."""
        return (self.actions >= 0).sum(-1)

    def picked(self, rows: np.ndarray) -> "Rows":
        """Copies of the rows (P, R')."""
        return Rows(*(np.take_along_axis(x, rows[..., None], 1) for x in (self.actions, self.nodes, self.states)))

    def without(self, rows: np.ndarray) -> "Rows":
        """The same with the rows (P, R) of bool taken out."""
        return Rows(*(np.where(rows[..., None], -1, x) for x in (self.actions, self.nodes)), self.states)

    def joined(self, *others: "Rows") -> "Rows":
        every = (self, *others)
        return Rows(*(np.concatenate([getattr(x, name) for x in every], 1) for name in ("actions", "nodes", "states")))


def distinct(codes: np.ndarray) -> np.ndarray:
    """(P,) how many different numbers of at least 0 each prompt has among (P, R)."""
    codes = np.sort(codes, 1)
    return (codes[:, :1] >= 0).sum(1) + ((codes[:, 1:] != codes[:, :-1]) & (codes[:, 1:] >= 0)).sum(1)


def generated(rows: Rows) -> np.ndarray:
    """(P,) decisions that were drawn."""
    return sum(distinct(rows.nodes[..., at]) for at in range(rows.nodes.shape[-1]))


def trained(rows: Rows) -> np.ndarray:
    """(P,) decisions on the prefix tree: equal beginnings are computed once, however they came about."""
    total, codes = np.zeros(len(rows.actions), int), np.zeros(rows.actions.shape[:2], int)
    for at in range(rows.actions.shape[-1]):
        actions = rows.actions[..., at]
        codes = np.where((actions < 0) | (codes < 0), -1, codes * ACTIONS + actions)
        total += distinct(codes)
    return total


class Drawing:
    """Draws the decisions of one step.

    Args:
        probs: (P, K, seen states, A).
        done: share of the run that is over.
    """

    def __init__(self, task: Task, probs: np.ndarray, rng: np.random.Generator, done: float = 0.0):
        self.task, self.probs, self.rng, self.done = task, probs, rng, done
        self.prompts = np.arange(len(probs))[:, None]
        self._cumulative, self._rows_drawn = probs.cumsum(-1), 0

    def empty(self, rows: int) -> Rows:
        return Rows.empty(len(self.probs), rows, self.task.length)

    def probs_at(self, rows: Rows, at: int) -> np.ndarray:
        """(P, R, A)."""
        return self.probs[self.prompts, at, self.task.seen(rows.states[..., at])]

    def draw(self, rows: Rows, begin: np.ndarray | int, end: int) -> Rows:
        """Draw each row's decisions from `begin`, (P, R), on, to `end`; gives the rows, changed."""
        begin = np.broadcast_to(begin, rows.actions.shape[:2])
        for at in range(begin.min(), end):
            cumulative = self._cumulative[self.prompts, at, self.task.seen(rows.states[..., at])]
            actions = (self.rng.random((*begin.shape, 1)) > cumulative[..., :-1]).sum(-1)
            self.take(rows, at, actions, begin <= at)
        return self.close(rows)

    def take(self, rows: Rows, at: int, actions: np.ndarray, where: np.ndarray) -> None:
        """The rows (P, R) of bool take these actions as new decisions."""
        numbers = (self._rows_drawn + np.arange(where.shape[1])) * self.task.length + at
        rows.actions[..., at] = np.where(where, actions, rows.actions[..., at])
        rows.nodes[..., at] = np.where(where, numbers, rows.nodes[..., at])
        states = rows.states[..., at]
        rows.states[..., at + 1] = np.where(
            rows.actions[..., at] < 0, states, self.task.after(states, rows.actions[..., at])
        )

    def close(self, rows: Rows) -> Rows:
        """What is drawn from here on are other decisions than those of the rows."""
        self._rows_drawn += rows.actions.shape[1]
        return rows

    def fill(self, rows: Rows, choose: Callable[[Rows, int], tuple[np.ndarray, np.ndarray]]) -> Rows:
        """Adds forks of the rows until N x K decisions are drawn; the last one is late enough to draw no more.

        Args:
            choose: of the rows and the number of the fork the sources and the first decisions drawn anew, (P,) each.
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
    """Args:
    absolute, relative: the second most likely action opens a branch when its probability is above the first, and
        less than the second below the most likely one's.
    branches: so many at most; they take the most likely action until all are there, and are drawn from then on.
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
    """The numbers of decisions after each third; fewer levels where there are fewer decisions."""
    return np.cumsum([len(part) for part in np.array_split(np.arange(length), min(3, length))]).tolist()


def spread(length: int) -> Sequence[int]:
    """Ends after each level of a tree that forks on all of them: N x K decisions where the levels are equally long."""
    return {1: (N,), 2: (N // 2, 3 * N // 2), 3: (N // 4, 3 * N // 4, 2 * N)}[len(level_ends(length))]


def straight(length: int, ends: int = N) -> list[int]:
    """As many ends after each level: without a guide, independent answers."""
    return [ends] * len(level_ends(length))


def levels(drawing: Drawing, guide: Guide | None = None, ends: Callable[[int], Sequence[int]] = straight) -> Rows:
    """Dropped prefixes are rows of less than K decisions, the last ones; where all would be dropped, none is.

    Args:
        ends: K -> the ends after each level, never fewer than after the one before.
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
    """Answers are begun as long as fewer than N x K decisions are drawn, so that the last one may draw some more."""
    *checked, length = level_ends(drawing.task.length)
    shortest = checked[0] if checked else length
    rows = independent(drawing, answers=-(-N * length // shortest))
    for at in checked:
        lost = (guide(rows, at) < KEPT_FROM) & (rows.lengths >= at)
        for values in (rows.actions, rows.nodes):
            values[..., at:] = np.where(lost[..., None], -1, values[..., at:])
    return rows.without(rows.lengths.cumsum(1) - rows.lengths >= N * length)
