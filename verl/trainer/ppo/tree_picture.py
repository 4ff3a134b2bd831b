"""Draws a prompt's tree as a small picture, for trackers that show images."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure

from verl.workers.rollout.trajectory_tree import TOOL

# The colors of scripts/view_trees.html, from the lowest to the highest reward, and for branches without a reward.
COLORS = LinearSegmentedColormap.from_list("rewards", [(0.92, 0.50, 0.38), (0.97, 0.93, 0.77), (0.45, 0.70, 0.85)])
WITHOUT_REWARD = (0.73, 0.75, 0.78, 1.0)
INCHES, DOTS_PER_INCH = (8.0, 3.5), 100


def tree_picture(tree: Mapping[str, Any]) -> np.ndarray:
    """Return the picture of a tree (height, width, 4) in RGBA, 8 bits each; its size does not depend on the tree.

    `tree` is a line of the trees file. A horizontal line is a segment, from its first to its last token; a tool's is
    dotted. Its color is the mean reward of the trajectories through it, and gray if none has a reward.
    """
    segments = tree["segments"]
    parents = [segment["parent"] for segment in segments]
    heights, rewards = segment_heights(parents), mean_rewards(parents, tree["leaves"], tree["rewards"])
    ends: list[int] = []
    lines, forks = [], []
    for segment, parent, height in zip(segments, parents, heights, strict=True):
        start = 0 if parent is None else ends[parent]
        ends.append(start + len(segment["token_ids"]))
        lines.append([(start, height), (ends[-1], height)])
        if parent is not None:
            forks.append([(start, heights[parent]), (start, height)])
    numbers = [reward for reward in rewards if reward is not None]
    scale = Normalize(min([0.0, *numbers]), max([1.0, *numbers]))
    colors = [WITHOUT_REWARD if reward is None else COLORS(scale(reward)) for reward in rewards]
    styles = ["dotted" if segment.get("author") == TOOL else "solid" for segment in segments]

    figure = Figure(INCHES, DOTS_PER_INCH, layout="constrained")
    canvas, axes = FigureCanvasAgg(figure), figure.add_subplot()
    axes.add_collection(LineCollection(forks, colors=[WITHOUT_REWARD], linewidths=1))
    axes.add_collection(LineCollection(lines, colors=colors, linestyles=styles, linewidths=4))
    axes.set(xlim=(0, max(ends, default=0) or 1), ylim=(max(heights, default=0) + 0.5, -0.5), yticks=[])
    axes.set_xlabel("response token")
    figure.colorbar(ScalarMappable(scale, COLORS), ax=axes, label="mean reward")
    canvas.draw()
    return np.array(canvas.buffer_rgba())


def segment_heights(parents: list[int | None]) -> list[float]:
    """Return the line on which each segment is drawn, from the segments' parents (earlier segments or None): 0, 1, …
    for ends of branches, the children's mean for others."""
    children: dict[int | None, list[int]] = {}
    for segment, parent in enumerate(parents):
        children.setdefault(parent, []).append(segment)
    heights, line = [0.0] * len(parents), 0
    stack = children.get(None, [])[::-1]
    while stack:
        segment = stack.pop()
        stack += children.get(segment, [])[::-1]
        if segment not in children:
            heights[segment], line = line, line + 1
    for segment in reversed(range(len(parents))):
        if segment in children:
            heights[segment] = sum(heights[child] for child in children[segment]) / len(children[segment])
    return heights


def mean_rewards(parents: list[int | None], leaves: list[int], rewards: list[float | None]) -> list[float | None]:
    """Return the mean reward of the trajectories through each segment; None if none of them has a reward.

    `leaves` are the trajectories' last segments, and `rewards` are None for those without an answer.
    """
    sums, counts = [0.0] * len(parents), [0] * len(parents)
    for leaf, reward in zip(leaves, rewards, strict=True):
        if reward is not None:
            sums[leaf] += reward
            counts[leaf] += 1
    for segment in reversed(range(len(parents))):
        if (parent := parents[segment]) is not None:
            sums[parent] += sums[segment]
            counts[parent] += counts[segment]
    return [total / count if count else None for total, count in zip(sums, counts, strict=True)]
