"""The kinds of structures that an answer can have; `structure.py` reads them, `equality.py` compares them."""

from dataclasses import dataclass
from typing import Any

RELATIONS = ("=", "<", "<=", ">", ">=", "!=", "in", "notin", "equiv")
SET_OPERATORS = ("cup", "cap", "minus")
BOUND = "the set's element"
INTEGER = "any whole number"


@dataclass(frozen=True)
class Formula:
    """A formula with its unit, in one spelling for each unit, and its text without blanks."""

    tree: tuple
    unit: str = ""
    text: str = ""


@dataclass(frozen=True)
class Words:
    """Words that are no formula."""

    text: str


@dataclass(frozen=True)
class Phrase:
    """Words and structures in turn, such as 3 hours 20 minutes."""

    parts: tuple


@dataclass(frozen=True)
class Bracketed:
    """A tuple, an interval, or, in braces, a set."""

    brackets: str  # the opening and the closing one
    items: tuple


@dataclass(frozen=True)
class Builder:
    """A set of all `head` that fulfil the conditions; a single symbol as head is named BOUND."""

    head: Any
    conditions: "Listing"


@dataclass(frozen=True)
class NamedSet:
    """A set with a letter of its own, such as R; the letter of the empty set is O."""

    name: str


@dataclass(frozen=True)
class Chain:
    """Sides with relations between them, or sets with operators between them, applied from left to right."""

    sides: tuple
    relations: tuple


@dataclass(frozen=True)
class Listing:
    """One or more structures beside each other, such as 1, 2 or 3; `with_or` if an "or" stands between them. `label` is
    the letter of multiple choice before them."""

    items: tuple
    with_or: bool = False
    label: str = ""


def symbol(name: str) -> Formula:
    """Return the formula that is a symbol."""
    return Formula(("symbol", name), text=name.replace(" ", ""))


def is_operation(structure: Any) -> bool:
    """Return whether a structure is a union, an intersection or a difference of sets."""
    return isinstance(structure, Chain) and set(structure.relations) <= set(SET_OPERATORS)
