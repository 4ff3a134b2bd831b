"""The trajectories of one prompt that share prefixes, as a tree of segments.

A segment is a run of tokens by one author (the model, or a tool); a trajectory is the path from the root to a leaf. A
fork inside a segment splits it, so that shared tokens are stored once:

    prompt ── A "3+4" ─┬─ B "*2=14"     trajectories: A B, A C
                       └─ C "-1=6"

Metrics, the tree viewer and training on shared prefixes read this one structure.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

MODEL, TOOL = "model", "tool"
# where a group rollout leaves the tree, as JSON, and its metrics: extra_fields of the first session
TREE, TREE_METRICS = "trajectory_tree", "tree_metrics"
# with a prompt: how often its problem has been submitted in this step before
OCCURRENCE = "occurrence"
# with a prompt: how vLLM is to sample its tokens (vllm_patches.adaptive_temperature)
ADAPTIVE_TEMPERATURE = "adaptive_temperature"


@dataclass
class Segment:
    """Consecutive tokens of one author.

    Args:
        parent: index of the segment before it; None for one that follows the prompt.
        token_ids: the tokens.
        log_probs: log-probability of each token when it was chosen; None for a tool's tokens.
        author: `model` or `tool`; a tool's tokens are not trained on (mask 0).
        info: what the method knows about it (probability at the fork, why it was pruned, …), in JSON's types.
    """

    parent: int | None
    token_ids: list[int]
    log_probs: list[float] | None = None
    author: str = MODEL
    info: dict = field(default_factory=dict)

    def __post_init__(self):
        if self.author not in (MODEL, TOOL):
            raise ValueError(f"author={self.author!r}: expected {MODEL!r} or {TOOL!r}")
        if self.author == MODEL and self.log_probs is not None and len(self.log_probs) != len(self.token_ids):
            raise ValueError(f"{len(self.log_probs)} log_probs for {len(self.token_ids)} tokens")


@dataclass
class TrajectoryTree:
    """`leaves` are the segments that end the n trajectories, in branch order; a leaf may be named more than once.

    Segments that no leaf reaches are what was generated and dropped; they stay for the viewer and the metrics.
    """

    prompt_ids: list[int]
    segments: list[Segment] = field(default_factory=list)
    leaves: list[int] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)

    def add(self, segment: Segment) -> int:
        """Append a segment; returns its index.

        Raises:
            IndexError: its parent is not in the tree.
        """
        if segment.parent is not None and not 0 <= segment.parent < len(self.segments):
            raise IndexError(f"parent {segment.parent} of {len(self.segments)} segments")
        self.segments.append(segment)
        return len(self.segments) - 1

    def path(self, leaf: int) -> list[int]:
        """Indices of the segments from the prompt to `leaf`."""
        path = []
        at: int | None = leaf
        while at is not None:
            path.append(at)
            at = self.segments[at].parent
        return path[::-1]

    def trajectories(self) -> list[list[int]]:
        """Response token ids of every trajectory in branch order, end-of-sequence included, no padding."""
        return [[t for i in self.path(leaf) for t in self.segments[i].token_ids] for leaf in self.leaves]

    def response_masks(self) -> list[list[int]]:
        """1 for the model's tokens, 0 for a tool's; as `trajectories`."""
        return [
            [int(self.segments[i].author == MODEL) for i in self.path(leaf) for _ in self.segments[i].token_ids]
            for leaf in self.leaves
        ]

    def log_probs(self) -> list[list[float]]:
        """Log-probabilities as `trajectories`; 0 for a tool's tokens."""
        return [[p for i in self.path(leaf) for p in self._log_probs_of(self.segments[i])] for leaf in self.leaves]

    @staticmethod
    def _log_probs_of(segment: Segment) -> Sequence[float]:
        if segment.author == TOOL or segment.log_probs is None:
            return [0.0] * len(segment.token_ids)
        return segment.log_probs

    def sorted_by(self, key: Callable[[Segment], Any]) -> "TrajectoryTree":
        """The same tree with segments numbered depth first, siblings by `key`: not by when they were made."""
        children = defaultdict(list)
        for i, segment in enumerate(self.segments):
            children[segment.parent].append(i)
        tree, new = TrajectoryTree(self.prompt_ids, metrics=self.metrics), {}
        waiting = sorted(children[None], key=lambda i: key(self.segments[i]), reverse=True)
        while waiting:
            at = waiting.pop()
            segment = self.segments[at]
            new[at] = tree.add(replace(segment, parent=None if segment.parent is None else new[segment.parent]))
            waiting += sorted(children[at], key=lambda i: key(self.segments[i]), reverse=True)
        tree.leaves = [new[leaf] for leaf in self.leaves]
        return tree

    def segment_ids(self) -> list[list[int]]:
        """For each token of each trajectory its segment's index; as `trajectories`. Equal: the same shared token."""
        return [[i for i in self.path(leaf) for _ in self.segments[i].token_ids] for leaf in self.leaves]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "TrajectoryTree":
        data = json.loads(text)
        segments = [Segment(**segment) for segment in data.pop("segments")]
        return cls(segments=segments, **data)


def tree_of_rows(
    prompt_ids: Sequence[int],
    rows: Sequence[Sequence[int]],
    log_probs: Sequence[Sequence[float]] | None = None,
    returned: Sequence[int] | None = None,
) -> TrajectoryTree:
    """Builds the tree of token sequences by their common prefixes.

    Args:
        prompt_ids: the prompt.
        rows: responses, all tokens by the model.
        log_probs: of each token; where rows share a token the first row's is kept.
        returned: which rows are trajectories, in order (repeats allowed); all by default.

    Returns:
        the tree; `info["rows"]` of a segment names the rows that run through it.
    """
    tree = TrajectoryTree(list(prompt_ids))
    leaf_of: dict[int, int | None] = {}
    waiting: list[tuple[list[int], int, int | None]] = [(list(range(len(rows))), 0, None)]
    while waiting:
        members, start, parent = waiting.pop()
        for row in members:
            if len(rows[row]) == start:
                leaf_of[row] = parent
        by_token: dict[int, list[int]] = {}
        for row in members:
            if len(rows[row]) > start:
                by_token.setdefault(rows[row][start], []).append(row)
        for same in by_token.values():
            end = _common_end([rows[row] for row in same], start)
            first = same[0]
            chosen = list(log_probs[first][start:end]) if log_probs is not None else None
            segment = Segment(parent, list(rows[first][start:end]), chosen, info={"rows": same})
            waiting.append((same, end, tree.add(segment)))
    for row in returned if returned is not None else range(len(rows)):
        leaf = leaf_of[row]
        # an empty response has no segment yet
        tree.leaves.append(tree.add(Segment(None, [], [], info={"rows": [row]})) if leaf is None else leaf)
    return tree


def _common_end(rows: list[Sequence[int]], start: int) -> int:
    """Where the rows, equal at `start`, stop being equal."""
    end, shortest = start + 1, min(len(row) for row in rows)
    while end < shortest and all(row[end] == rows[0][end] for row in rows):
        end += 1
    return end


def writes_trees(config, step: int) -> bool:
    """Whether trees of this training step are kept (`trainer.tree_freq`)."""
    freq = config.trainer.get("tree_freq", -1)
    return freq > 0 and step % freq == 0
