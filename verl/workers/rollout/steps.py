"""Splits trajectories into steps; a tree policy may fork where a step ends."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from verl.workers.rollout.trajectory_tree import TOOL, Path, Segment, SegmentInfo, TrajectoryTree


def split_steps(
    segments: Sequence[Segment],
    text_of: Callable[[int], str],
    delimiter: str | None = None,
    max_step_tokens: int | None = None,
) -> list[list[Segment]]:
    """Split a trajectory into steps, and return the segments of each; a segment that spans several steps is cut.

    A step ends with a tool's result, or earlier with the token that completes the delimiter or reaches
    `max_step_tokens`. No step ends between a call and its result.

    Args:
        text_of: function that decodes one token.
        delimiter: text that ends a step and may span tokens; None for no such text.
        max_step_tokens: largest number of the model's tokens in a step; None for no limit.
    """
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
