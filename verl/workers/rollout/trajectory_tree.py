"""A tree of segments that holds the trajectories of one prompt and stores shared prefixes once.

A segment is a run of tokens by one author (the model, or a tool); a trajectory is the path from the root to a leaf. A
fork inside a segment splits it, so that shared tokens are stored once:

    prompt ── A "3+4" ─┬─ B "*2=14"     trajectories: A B, A C
                       └─ C "-1=6"

Metrics, the tree viewer and training on shared prefixes read this one structure.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from verl.utils.token_fields import TokenField
from verl.workers.rollout.contexts import Context

MODEL, TOOL = "model", "tool"
# keys in the first session's extra_fields for the tree, as JSON, and for its metrics
TREE, TREE_METRICS = "trajectory_tree", "tree_metrics"
# key in the same place for the record that `BranchPolicy.data_for_trainer` returned, pickled: TransferQueue's encoder
# turns dataclasses and named tuples into plain dictionaries and lists
TREE_DATA = "tree_data"
# key in the same place for {tool's name: the tool's report of its own fault}
TOOL_FAULTS = "tool_faults"
# index of each token's segment; equal indices in several rows of a prompt mark shared tokens
SEGMENT_IDS = TokenField("segment_ids", "this algorithm.adv_estimator", unsent=-1)
# 1 for segments at which a search gave up; a trajectory that ends there has no answer, and reward 0
DROPPED_STEPS = TokenField("dropped", "the trainer", unsent=0)


@dataclass
class SegmentInfo:
    """Information on a segment beside its tokens. An answer has `calls`, `state` and `context` of `Answer`."""

    calls: tuple[dict[str, Any], ...] = ()
    state: Any = None
    fields: dict[str, float] = field(default_factory=dict)  # name of a `TokenField` -> number for all its tokens
    entropies: list[float] | None = None  # each token's entropy in nats, for policies that read it while the tree grows
    record: Any = None  # the policy's own frozen record, hidden from the viewer
    notes: dict[str, Any] = field(default_factory=dict)  # data in JSON's types for the viewer only
    ends_step: bool = False  # whether a step of the policy ends with the segment
    context: list[int] | None = None

    def shown(self) -> dict[str, Any]:
        """Return the data that the viewer shows, in JSON's types."""
        about = self.calls[0] if len(self.calls) == 1 else {"calls": list(self.calls)} if self.calls else {}
        context = {} if self.context is None else {"context_tokens": len(self.context)}
        return {**about, **context, **self.fields, **self.notes}


@dataclass
class Segment:
    """Consecutive tokens of one author."""

    parent: int | None  # index of the segment before it; None if it follows the prompt
    token_ids: list[int]
    log_probs: list[float] | None = None  # log-probability of each token when it was chosen; None for a tool's
    author: str = MODEL  # or TOOL, whose tokens are not trained on (mask 0)
    info: SegmentInfo = field(default_factory=SegmentInfo)

    def __post_init__(self):
        if self.author not in (MODEL, TOOL):
            raise ValueError(f"author={self.author!r}: expected {MODEL!r} or {TOOL!r}")
        if self.author == MODEL and self.log_probs is not None and len(self.log_probs) != len(self.token_ids):
            raise ValueError(f"{len(self.log_probs)} log_probs for {len(self.token_ids)} tokens")

    def part(self, start: int, end: int | None = None) -> "Segment":
        """Return the segment cut to these tokens and their log-probabilities, with the same `info`."""
        log_probs = None if self.log_probs is None else self.log_probs[start:end]
        return replace(self, token_ids=self.token_ids[start:end], log_probs=log_probs)


@dataclass(frozen=True)
class Path:
    """A trajectory from its prompt up to some token."""

    tokens: tuple[int, ...] = ()  # the response so far, including the environment's results
    answers: tuple[tuple[int, int], ...] = ()  # beginning and end of each of the environment's results in `tokens`
    state: Any = field(default=None, compare=False)  # the environment's, after its last answer
    context: Context | None = field(default=None, compare=False)  # the present turn's (contexts.py)

    @property
    def turn(self) -> int:
        """Index in `tokens` at which the model's current turn begins, after the environment's last result."""
        return self.answers[-1][1] if self.answers else 0

    @property
    def calls(self) -> int:
        """Number of the environment's answers so far."""
        return len(self.answers)

    def request(self, prompt_ids: Sequence[int]) -> list[int]:
        """Return the tokens that the model reads to continue the path."""
        if self.context is None:
            return [*prompt_ids, *self.tokens]
        return [*self.context.ids, *self.tokens[self.context.start :]]

    @classmethod
    def of(cls, segments: Iterable[Segment]) -> "Path":
        """Return the path along a trajectory's segments, from the first one on."""
        path = cls()
        for segment in segments:
            path = path.then(segment)
        return path

    def then(self, segment: Segment) -> "Path":
        """Return the path extended by one segment; after a tool's segment a new turn begins."""
        tokens = (*self.tokens, *segment.token_ids)
        if segment.author == TOOL:
            context = self.context if segment.info.context is None else Context(len(tokens), segment.info.context)
            return Path(tokens, (*self.answers, (len(self.tokens), len(tokens))), segment.info.state, context)
        return replace(self, tokens=tokens)


@dataclass
class TrajectoryTree:
    """A prompt's segments and trajectories; `leaves` lists the segments that end the trajectories, in the rows' order.

    A leaf may be listed more than once. Segments on no path to a leaf were generated and dropped; the viewer and the
    metrics still use them. `turn_rewards` maps, for each trajectory, the number of tokens up to the end of a turn to
    its reward; it is empty if the environment gives no rewards.
    """

    prompt_ids: list[int]
    segments: list[Segment] = field(default_factory=list)
    leaves: list[int] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    turn_rewards: list[dict[int, float]] = field(default_factory=list)

    def __post_init__(self):
        self._child_of: dict[tuple[int | None, int], int] = {}  # (parent, first token) -> segment of the model
        self._answers: defaultdict[int | None, list[int]] = defaultdict(list)  # parent -> segments of a tool
        for i in range(len(self.segments)):
            self._index(i)

    def _index(self, i: int) -> None:
        segment = self.segments[i]
        if segment.author == TOOL:
            self._answers[segment.parent].append(i)
        elif segment.token_ids:
            self._child_of.setdefault((segment.parent, segment.token_ids[0]), i)

    def add(self, segment: Segment) -> int:
        """Append a segment and return its index; raise IndexError if its parent is not in the tree."""
        if segment.parent is not None and not 0 <= segment.parent < len(self.segments):
            raise IndexError(f"parent {segment.parent} of {len(self.segments)} segments")
        self.segments.append(segment)
        self._index(len(self.segments) - 1)
        return len(self.segments) - 1

    def add_chain(self, parent: int | None, segments: Iterable[Segment]) -> int:
        """Append one or more segments, one below the other, without sharing tokens; return the last one's index."""
        for segment in segments:
            parent = last = self.add(replace(segment, parent=parent))
        return last

    def path(self, leaf: int | None) -> list[int]:
        """Return the indices of the segments from the prompt to `leaf`; none if `leaf` is None, the prompt."""
        path = []
        while leaf is not None:
            path.append(leaf)
            leaf = self.segments[leaf].parent
        return path[::-1]

    def is_dropped(self, leaf: int) -> bool:
        """Return whether a search gave up the trajectory that ends at `leaf`, so that it has no answer."""
        return bool(self.segments[leaf].info.shown().get(DROPPED_STEPS.name))  # `shown` also works after `from_json`

    def trajectories(self) -> list[list[int]]:
        """Return each trajectory's response token ids, in `leaves` order, with end-of-sequence, without padding."""
        return self.along_paths([segment.token_ids for segment in self.segments])

    def along_paths(self, values: Sequence[Sequence]) -> list[list]:
        """Return the values of each trajectory's tokens in the layout of `trajectories`, from each segment's values."""
        return [list(chain.from_iterable([values[i] for i in self.path(leaf)])) for leaf in self.leaves]

    def repeated(self, values: Sequence) -> list[list]:
        """Return the values of each trajectory's tokens in the layout of `trajectories`, from one value per segment."""
        return self.along_paths([[v] * len(s.token_ids) for v, s in zip(values, self.segments, strict=True)])

    def response_masks(self) -> list[list[int]]:
        """Return 1 for each token of the model and 0 for each token of a tool, in the layout of `trajectories`."""
        return self.repeated([int(segment.author == MODEL) for segment in self.segments])

    def log_probs(self) -> list[list[float]]:
        """Return each token's log-probability, 0 for a tool's tokens, in the layout of `trajectories`."""
        return self.along_paths([s.log_probs or [0.0] * len(s.token_ids) for s in self.segments])

    def insert(self, parent: int | None, segments: Iterable[Segment]) -> int:
        """Append segments one after another below `parent`, reusing tokens that are already there; return the index of
        the last token's segment. Without tokens it is `parent`, or if that is None, a new empty segment.

        If a segment of the model diverges in the middle of an existing one, the existing one is split. A tool's answer
        is never split, and reused only with an equal state. Shared tokens keep their log-probabilities and `info`.
        """
        at = parent
        for segment in segments:
            if segment.author == TOOL:
                equal = (i for i in self._answers[at] if _is_same_answer(self.segments[i], segment))
                if (answer := next(equal, None)) is None:
                    answer = self.add(replace(segment, parent=at))
                at = answer
                continue
            tokens, start = segment.token_ids, 0
            while start < len(tokens):
                child = self._child_of.get((at, tokens[start]))
                if child is None:
                    at = self.add(replace(segment.part(start), parent=at))
                    break
                same = common_prefix(self.segments[child].token_ids, tokens[start:])
                at = child if same == len(self.segments[child].token_ids) else self._split(child, same)
                start += same
        return self.add(Segment(None, [], [])) if at is None else at

    def _split(self, index: int, offset: int) -> int:
        """Move a segment's first tokens to a new parent and return its index; the rest keeps index and `info`."""
        whole = self.segments[index]
        del self._child_of[whole.parent, whole.token_ids[0]]
        head = self.add(replace(whole.part(0, offset), info=SegmentInfo()))
        self.segments[index] = replace(whole.part(offset), parent=head)
        self._index(index)
        return head

    def renumbered(self) -> "TrajectoryTree":
        """Return the tree with segments numbered depth first in the order of the trajectories. Siblings that no
        trajectory reaches come last, sorted by author and token ids."""
        first: dict[int, int] = {}
        for position, leaf in enumerate(self.leaves):
            for i in self.path(leaf):
                first.setdefault(i, position)
        children = defaultdict(list)
        for i, segment in enumerate(self.segments):
            children[segment.parent].append(i)

        def order(i: int) -> tuple:
            return first.get(i, len(self.leaves)), self.segments[i].author, self.segments[i].token_ids

        tree = TrajectoryTree(self.prompt_ids, metrics=self.metrics, turn_rewards=self.turn_rewards)
        new: dict[int, int] = {}
        waiting = sorted(children[None], key=order, reverse=True)
        while waiting:
            at = waiting.pop()
            segment = self.segments[at]
            new[at] = tree.add(replace(segment, parent=None if segment.parent is None else new[segment.parent]))
            waiting += sorted(children[at], key=order, reverse=True)
        tree.leaves = [new[leaf] for leaf in self.leaves]
        return tree

    def contexts(self, leaf: int) -> list[Context]:
        """Return the contexts of the trajectory that ends at `leaf`, counted from the prompt's first token on."""
        contexts, n_tokens = [], len(self.prompt_ids)
        for i in self.path(leaf):
            n_tokens += len(self.segments[i].token_ids)
            if (ids := self.segments[i].info.context) is not None and i != leaf:
                contexts.append(Context(n_tokens, ids))
        return contexts

    def segment_ids(self) -> list[list[int]]:
        """Return the index of each token's segment in the layout of `trajectories`; equal indices are shared tokens."""
        return self.repeated(range(len(self.segments)))

    def shared_tokens(self) -> float:
        """Return 1 - stored tokens / sum of the trajectories' lengths: the share saved by storing prefixes once. Tokens
        of dropped segments are stored, too, so that the result may be negative."""
        stored = sum(len(segment.token_ids) for segment in self.segments)
        return 1 - stored / sum(map(len, self.trajectories()))

    def to_dict(self) -> dict[str, Any]:
        """Return the tree in JSON's types; the `info` of each segment is what the viewer shows."""
        segments = [{**vars(segment), "info": segment.info.shown()} for segment in self.segments]
        return dict(prompt_ids=self.prompt_ids, segments=segments, leaves=self.leaves, metrics=self.metrics)

    def to_json(self) -> str:
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> "TrajectoryTree":
        data = json.loads(text)
        segments = [
            Segment(**{**segment, "info": SegmentInfo(notes=segment["info"])}) for segment in data.pop("segments")
        ]
        return cls(segments=segments, **data)


def tree_of_rows(
    prompt_ids: Sequence[int], rows: Sequence[Sequence[int]], log_probs: Sequence[Sequence[float]] | None = None
) -> TrajectoryTree:
    """Return the tree of responses by the model that share prefixes by chance, such as independent samples. A token
    that rows share keeps the first row's log-probability."""
    tree = TrajectoryTree(list(prompt_ids))
    for i, row in enumerate(rows):
        chosen = None if log_probs is None else list(log_probs[i])
        tree.leaves.append(tree.insert(None, [Segment(None, list(row), chosen)]))
    return tree.renumbered()


def first_tokens(segments: Iterable[Segment], n: int) -> list[Segment]:
    """Return the segments that hold a trajectory's first n tokens; the last of them may be cut. A tool's answer is
    never cut: without room for all of it, it is left out."""
    first = []
    for segment in segments:
        if n < 1 or segment.author == TOOL and n < len(segment.token_ids):
            break
        first.append(segment.part(0, n))
        n -= len(segment.token_ids)
    return first


def _is_same_answer(a: Segment, b: Segment) -> bool:
    return a.token_ids == b.token_ids and (a.info.state, a.info.context) == (b.info.state, b.info.context)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the longest common prefix of two sequences."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def writes_trees(config, step: int) -> bool:
    """Return whether the trees of this training step are written down (every `trainer.tree_freq` steps)."""
    freq = config.trainer.get("tree_freq", -1)
    return freq > 0 and step % freq == 0


def shown_prompts(config) -> int:
    """Return the number of a step's prompts whose diversity is measured and whose trees are written."""
    return config.trainer.get("tree_prompts", 8)


def split_steps(
    segments: Sequence[Segment],
    text_of: Callable[[int], str],
    delimiter: str | None = None,
    max_step_tokens: int | None = None,
) -> list[list[Segment]]:
    """Split a trajectory into steps, and return the segments of each; a segment that spans several steps is cut. A step
    ends with a tool's result, or earlier with the token that completes the delimiter, which may span tokens, or reaches
    `max_step_tokens`. No step ends between a call and its result. `text_of` decodes one token."""
    steps: list[list[Segment]] = [[]]
    text, n_tokens = "", 0
    for segment, following in zip(segments, [*segments[1:], None], strict=True):
        if segment.author == TOOL:
            steps[-1].append(segment)
            steps, text, n_tokens = [*steps, []], "", 0
            continue
        start, last = 0, len(segment.token_ids)
        for end, token in enumerate(segment.token_ids, 1):
            text, n_tokens = text + text_of(token), n_tokens + 1
            complete = n_tokens == max_step_tokens or (delimiter is not None and delimiter in text)
            is_call = end == last and following is not None and following.author == TOOL
            if end == last or complete:
                steps[-1].append(replace(segment.part(start, end), parent=None, info=SegmentInfo()))
                start = end
            if complete and not is_call:
                steps, text, n_tokens = [*steps, []], "", 0
    return [step for step in steps if step]


def add_steps(tree: TrajectoryTree, at: int | None, steps: Iterable[Sequence[Segment]]) -> list[int]:
    """Add steps one below the other after the segment `at`, or the prompt; return the last segment of each step."""
    ends = []
    for step in steps:
        for segment in step:
            at = tree.add(replace(segment, parent=at))
        ends.append(at)
    return ends


def path_to(tree: TrajectoryTree, at: int | None) -> Path:
    """Return the path from the prompt to the end of segment `at`; None for the prompt itself."""
    return Path.of(tree.segments[i] for i in tree.path(at))
