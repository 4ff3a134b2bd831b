"""Reads the sentences of word problems from stories.yaml; data.py joins them.

A problem consists of an opening, changes of a quantity, and an ending, which asks for the quantity. A line is a text
and its operation ("": none): an opening with an operation means `a op b`, other lines mean `quantity so far op b`.
"""

from pathlib import Path
from typing import NamedTuple

import yaml

Line = tuple[str, str]


class Story(NamedTuple):
    """Lines that fit together in any choice, and the things that they can be about."""

    openings: tuple[Line, ...]
    changes: tuple[Line, ...]
    endings: tuple[Line, ...]
    things: tuple[str, ...]


def read_story(parts: dict[str, list]) -> Story:
    """Return a story of the YAML file.

    Its parts `openings`, `changes`, `endings` and `things` are removed from `parts`.
    """
    lines = {name: tuple((text, operation) for text, operation in parts.pop(name)) for name in Story._fields[:3]}
    return Story(**lines, things=tuple(parts.pop("things")))


_texts = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
WOMEN: tuple[str, ...] = tuple(_texts["women"])
MEN: tuple[str, ...] = tuple(_texts["men"])
STORIES: dict[str, Story] = {name: read_story(parts) for name, parts in _texts["stories"].items()}
