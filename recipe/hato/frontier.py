"""The state of a search for reasoning steps: which steps of a tree are open, which have ended, which were dropped.

    problem ─┬─ 1 "let x = 3" (drawn twice) ─┬─ 3 "x + 4 = 7. Answer 7"
             │                               └─ 4 "x - 4 = -1. Answer -1"
             └─ 2 "let x = 5"     dropped: its tokens are released, or it is trained as wrong (`train_dropped`)

A step is a segment of the `TrajectoryTree`; with tools, the segments that follow without a fork, such as a tool's
result, belong to it as well. The problem is step 0, and steps are numbered as they are added: a parent has a smaller
number than its children.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from recipe.hato.keys import DRAWS
from verl.workers.rollout.trajectory_tree import DROPPED_STEPS, MODEL, Segment, TrajectoryTree
from verl.workers.rollout.tree_builder import Path

OPEN, EXPANDED, LEAF, PRUNED = "open", "expanded", "leaf", "pruned"
ROOT = 0


@dataclass
class StepNode:
    """A step's place in the tree, its estimates and its status.

    Args:
        parent: number of the preceding step; None for the problem.
        depth: number of steps from the problem, which has depth 0.
        segments: indices of its segments in the tree; empty for the problem.
        status: `open` (has no children yet), `expanded`, `leaf` (ended), `pruned` (dropped, with all steps below).
        children: numbers of its children, including dropped ones.
    """

    parent: int | None
    depth: int
    segments: list[int] = field(default_factory=list)
    value: float = 0.0
    uncertainty: float = 0.0
    status: str = OPEN
    children: list[int] = field(default_factory=list)


class Frontier:
    """The steps of a tree.

    Args:
        tree: the tree that receives the steps; empty at first.
        keeps_tokens: whether dropped steps keep their tokens until `train_dropped` chooses among them.
    """

    def __init__(self, tree: TrajectoryTree, *, keeps_tokens: bool = False):
        self.tree, self.keeps_tokens = tree, keeps_tokens
        self.steps = [StepNode(None, 0)]
        self.n_leaves = 0
        self.dropped: list[int] = []  # steps that were still open when dropped: their answers are unknown
        self.kept_at_depth: Counter[int] = Counter()  # depth -> number of kept steps, without the problem
        self._open = {ROOT}
        self._same: dict[tuple[int, tuple[int, ...]], int] = {}  # (parent, tokens) -> number of a kept step

    def add(
        self, parent: int, segments: Sequence[Segment], *, ended: bool, value: float = 0.0, uncertainty: float = 0.0
    ) -> int:
        """Add a step after `parent`, which is open or expanded, and return its number. An identical child is not added:
        field `DRAWS` of its first segment counts it once more, and its number is returned.

        `ended` says that the step ends the path, with an answer or at the token limit.
        """
        above, tokens = self.steps[parent], _tokens_of(segments)
        same = self._same.get((parent, tokens))
        if same is not None and _states_of(self._segments(same)) == _states_of(segments):
            self._segments(same)[0].info.fields[DRAWS.name] += 1
            return same
        step = StepNode(parent, above.depth + 1, value=value, uncertainty=uncertainty)
        at = above.segments[-1] if above.segments else None
        for segment in segments:
            at = self.tree.add(replace(segment, parent=at))
            step.segments.append(at)
        self.tree.segments[step.segments[0]].info.fields[DRAWS.name] = 1
        number = len(self.steps)
        self.steps.append(step)
        above.status = EXPANDED
        above.children.append(number)
        self._same[parent, tokens] = number
        self.kept_at_depth[step.depth] += 1
        self._open.discard(parent)
        if ended:
            step.status = LEAF
            self.n_leaves += 1
        else:
            self._open.add(number)
        return number

    def prune(self, number: int) -> None:
        """Drop a step and all steps below it, and each ancestor, except the problem, without another kept child. Their
        tokens are released unless `keeps_tokens` is set."""
        while self.steps[number].parent not in (None, ROOT):
            above = self.steps[number].parent
            if any(child != number and self.is_kept(child) for child in self.steps[above].children):
                break
            number = above
        waiting = [number]
        while waiting:
            at = waiting.pop()
            step = self.steps[at]
            if step.status == PRUNED:
                continue
            waiting += step.children
            segments = self._segments(at)
            self._same.pop((step.parent, _tokens_of(segments)), None)
            self.n_leaves -= step.status == LEAF
            if step.status == OPEN:
                self.dropped.append(at)
            self._open.discard(at)
            for segment in segments:
                segment.info.notes["pruned"] = "dropped by the search"
            if not self.keeps_tokens:
                self._release(at)
            self.kept_at_depth[step.depth] -= 1
            step.status = PRUNED

    def _release(self, number: int) -> None:
        for segment in self._segments(number):
            segment.token_ids, segment.log_probs = [], None if segment.log_probs is None else []

    def train_dropped(self, most: int, seed: int) -> list[int]:
        """Choose the dropped steps whose paths become rows, without an answer and with reward 0, in a complete tree;
        return them.

        Only steps that were open when they were dropped are chosen: at most `most`, drawn uniformly from the seed. All
        other dropped steps, except those on the path to a chosen one, release their tokens. Answers that a beam has
        dropped do not become rows, because they may be right.
        """
        chosen = sorted(random.Random(f"{seed} dropped").sample(self.dropped, max(0, min(most, len(self.dropped)))))
        on_paths = {ROOT}
        for number in chosen:
            for segment in self._segments(number):
                segment.info.fields[DROPPED_STEPS.name] = 1
                segment.info.notes["pruned"] = "dropped by the search, trained as wrong"
            while number not in on_paths:
                on_paths.add(number)
                number = self.steps[number].parent
        for number in range(1, len(self.steps)):
            if not self.is_kept(number) and number not in on_paths:
                self._release(number)
        return chosen

    @property
    def n_kept(self) -> int:
        """Return the number of kept steps, without the problem."""
        return self.kept_at_depth.total()

    def written(self, number: int) -> list[int]:
        """Return the tokens that the model wrote in a step; for the problem, the prompt's tokens."""
        if number == ROOT:
            return self.tree.prompt_ids
        return [token for segment in self._segments(number) if segment.author == MODEL for token in segment.token_ids]

    def _segments(self, number: int) -> list[Segment]:
        return [self.tree.segments[i] for i in self.steps[number].segments]

    def is_kept(self, number: int) -> bool:
        return self.steps[number].status != PRUNED

    def open_steps(self) -> list[int]:
        """Return the numbers of the steps without children that have not ended, ascending; at first the problem."""
        return sorted(self._open)

    def leaves(self) -> list[int]:
        """Return the last steps of the finished paths, depth first, so that neighbors share the longest prefixes."""
        leaves, waiting = [], [ROOT]
        while waiting:
            step = self.steps[number := waiting.pop()]
            if step.status == LEAF:
                leaves.append(number)
            waiting += step.children[::-1]
        return leaves

    def path(self, number: int) -> Path:
        """Return the response from the first step to the end of this one."""
        return Path.of(self._segments_to(number))

    def path_log_probs(self, number: int) -> list[float]:
        """Return the log-probabilities, in nats, of the model's tokens from the first step to the end of this one."""
        return [p for segment in self._segments_to(number) if segment.author == MODEL for p in segment.log_probs]

    def _segments_to(self, number: int) -> list[Segment]:
        numbers = []
        while number != ROOT:
            numbers.append(number)
            number = self.steps[number].parent
        return [segment for number in reversed(numbers) for segment in self._segments(number)]

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the finished tree (docs/metrics.md); the problem is not counted as a step."""
        made = len(self.steps) - 1
        return {
            "nodes_made": float(made),
            "nodes_pruned": float(made - self.n_kept),
            "nodes_kept": float(self.n_kept),
            "leaves": float(self.n_leaves),
            "depth": float(max((step.depth for step in self.steps if step.status == LEAF), default=0)),
        }


def _tokens_of(segments: Sequence[Segment]) -> tuple[int, ...]:
    return tuple(token for segment in segments for token in segment.token_ids)


def _states_of(segments: Sequence[Segment]) -> list:
    return [segment.info.state for segment in segments]
