"""Shows prompt groups in a run's trackers: each response with its reward and advantage, and the group's tree.

    wandb         the table `tree/prompt_groups` and the images `tree/pictures`
    tensorboard   the text `tree/prompt_groups` and the images `tree/picture_1`, `tree/picture_2`, …
    mlflow        the table `prompt_groups/step_000010.json` and the images `prompt_groups/step_000010_tree_1.png`, …

Other trackers get metrics only.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from textwrap import indent
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from pydantic import Field
from pydantic.dataclasses import dataclass as keys_dataclass

from verl.workers.config.keys import STRICT
from verl.workers.rollout.trajectory_tree import TOOL

logger = logging.getLogger(__name__)

TABLE = "tree/prompt_groups"
COLUMNS = ("step", "number", "prompt", "response", "reward", "advantage", "tree_page")
TRACKERS = ("wandb", "tensorboard", "mlflow")
# The colors of scripts/view_trees.html, from the lowest to the highest reward, and for branches without a reward.
COLORS = LinearSegmentedColormap.from_list("rewards", [(0.92, 0.50, 0.38), (0.97, 0.93, 0.77), (0.45, 0.70, 0.85)])
WITHOUT_REWARD = (0.73, 0.75, 0.78, 1.0)
INCHES, DOTS_PER_INCH = (8.0, 3.5), 100


@keys_dataclass(frozen=True, config=STRICT)
class GroupTableKeys:
    """Keys under trainer.group_table: the numbers of prompts that are shown of a step, of responses of each prompt, and
    of characters of each text, whose middle is left out."""

    prompts: int = Field(default=4, ge=0)
    responses: int = Field(default=8, ge=1)
    characters: int = Field(default=2000, ge=2)


@dataclass(frozen=True)
class ShownResponse:
    """A response in the table."""

    text: str
    reward: float | None  # None for a response without an answer
    advantage: float  # mean of its trained tokens
    tree_page: str  # address of the response on the page that scripts/view_trees.py writes


@dataclass(frozen=True)
class ShownGroup:
    """A prompt in the table, with some of its responses."""

    number: int  # place of the prompt's tree in the step's file of trees, from 1
    prompt: str
    responses: Sequence[ShownResponse]
    tree: Mapping[str, Any]  # the line of that file


def shortened(text: str, characters: int) -> str:
    """Return the text, or its first and last characters with a note of how many lie between them.

    >>> shortened("abcdefghij", 4)
    'ab […6 characters…] ij'
    """
    if len(text) <= characters:
        return text
    first = characters // 2
    return f"{text[:first]} […{len(text) - characters} characters…] {text[first - characters :]}"


def show_groups(trackers: Mapping[str, Any], step: int, groups: Sequence[ShownGroup]) -> None:
    """Write the groups of a step into those of `trackers` (by their names in trainer.logger) that can show them."""
    show = {"wandb": _show_in_wandb, "tensorboard": _show_in_tensorboard, "mlflow": _show_in_mlflow}
    chosen = [name for name in TRACKERS if name in trackers]
    pictures = [tree_picture(group.tree) for group in groups if chosen]
    for name in chosen:
        show[name](trackers[name], step, groups, pictures)


def table_rows(step: int, groups: Sequence[ShownGroup]) -> list[tuple]:
    """Return a row of the table for each response; its cells belong to `COLUMNS`."""
    return [
        (step, group.number, group.prompt, shown.text, shown.reward, shown.advantage, shown.tree_page)
        for group in groups
        for shown in group.responses
    ]


def _show_in_wandb(wandb, step: int, groups: Sequence[ShownGroup], pictures: Sequence[np.ndarray]) -> None:
    table = wandb.Table(columns=list(COLUMNS), data=list(map(list, table_rows(step, groups))))
    captions = [f"prompt {group.number}" for group in groups]
    images = [wandb.Image(picture, caption=text) for picture, text in zip(pictures, captions, strict=True)]
    wandb.log({TABLE: table, "tree/pictures": images}, step=step)


def _show_in_tensorboard(adapter, step: int, groups: Sequence[ShownGroup], pictures: Sequence[np.ndarray]) -> None:
    adapter.writer.add_text(TABLE, as_markdown(groups), step)
    for group, picture in zip(groups, pictures, strict=True):
        adapter.writer.add_image(f"tree/picture_{group.number}", picture, step, dataformats="HWC")
    adapter.writer.flush()


def as_markdown(groups: Sequence[ShownGroup]) -> str:
    """Return the groups in Markdown; prompts and responses are code blocks, which show their characters as they are."""
    code_block = partial(indent, prefix="    ", predicate=lambda line: True)
    parts = []
    for group in groups:
        parts += [f"## Prompt {group.number}", code_block(group.prompt)]
        for shown in group.responses:
            reward = "no answer" if shown.reward is None else f"reward {shown.reward:g}"
            parts.append(f"**{reward}, advantage {shown.advantage:g}**, `{shown.tree_page}`")
            parts.append(code_block(shown.text))
    return "\n\n".join(parts)


def _show_in_mlflow(adapter, step: int, groups: Sequence[ShownGroup], pictures: Sequence[np.ndarray]) -> None:
    """Write the table and the pictures as artifacts; a server that cannot be reached does not end the run."""
    import mlflow

    name = f"prompt_groups/step_{step:06d}"
    columns = zip(*table_rows(step, groups), strict=True)
    try:
        mlflow.log_table(dict(zip(COLUMNS, map(list, columns), strict=True)), f"{name}.json")
        for group, picture in zip(groups, pictures, strict=True):
            mlflow.log_image(picture, artifact_file=f"{name}_tree_{group.number}.png")
    except (mlflow.exceptions.MlflowException, OSError) as error:
        logger.warning("step %d: MLflow did not take the prompt groups: %s", step, error)


# ---- the picture of a tree ----


def tree_picture(tree: Mapping[str, Any]) -> np.ndarray:
    """Return the picture of a tree (height, width, 4) in RGBA, 8 bits each; its size does not depend on the tree.
    `tree` is a line of the trees file. A horizontal line is a segment, from its first to its last token; a tool's is
    dotted. Its color is the mean reward of the trajectories through it, and gray if none has a reward."""
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
    """Return the mean reward of the trajectories through each segment; None if none of them has a reward. `leaves` are
    the trajectories' last segments, and `rewards` are None for those without an answer."""
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
