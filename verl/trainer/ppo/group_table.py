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
from pydantic import Field
from pydantic.dataclasses import dataclass as keys_dataclass

from verl.trainer.ppo.tree_picture import tree_picture
from verl.workers.config.keys import STRICT

logger = logging.getLogger(__name__)

TABLE = "tree/prompt_groups"
COLUMNS = ("step", "number", "prompt", "response", "reward", "advantage", "tree_page")
TRACKERS = ("wandb", "tensorboard", "mlflow")


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
