"""The families of reasoning-gym, by what their verifiers do with an answer.

Most compare text, or read numbers, lists or moves. `FORMULAS` and `countdown` go to sympy, which runs a formula as
Python: only the names given here, numbers, and the signs of arithmetic may occur in one, so that it can name nothing
else. Five more families would run an answer to give a point for a Python list; in `worker.py` a reader of literals
takes that place.
"""

import importlib
import re
import warnings
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

MAX_ANSWER_CHARS = 16_384
REFUSED = {
    "coin_flip": "its verifier takes the beginning of the answer as right, so that 0 solves all problems",
    "composite": "it mixes families; name them in `families`",
    "game_of_life_halting": "its verifier takes every answer as right",
    "propositional_logic": "its verifier takes a premise as the conclusion",
    "puzzle24": "its verifier takes other numbers than the problem's, so that one answer solves all problems",
}


def _formula(names: str = "") -> re.Pattern:
    """Return the pattern of formulas with these names, and with single letters except those that sympy defines. Each
    number and word matches in one way only: with several, the match of a long answer would take for ever."""
    words = "|".join([*names.split(), "[A-HJ-MPRT-Za-z]"])
    return re.compile(rf"(?:\d+(?!\d)(?:\.\d+(?!\d))?|(?:{words})(?![A-Za-z])|[-+*/^() ])*")


_FUNCTIONS = "sin cos tan asin acos atan sinh cosh tanh exp log ln sqrt pi"
FORMULAS = {
    "polynomial_multiplication": _formula(),
    "intermediate_integration": _formula(_FUNCTIONS),
    "simple_integration": _formula(_FUNCTIONS),
}
# family -> pattern of the answers that its verifier may read
ALLOWED = FORMULAS | {
    # the verifier counts the words of digits: beside letters or in decimals it would miss numbers
    "countdown": re.compile(r"(?:[-+() \d]|\*(?!\*)|/(?!/))*"),
    # the verifier takes a distance of NaN for none
    "complex_arithmetic": re.compile("(?!.*nan).*", re.IGNORECASE | re.DOTALL),
}


def library() -> Any:
    """Return reasoning-gym's registry of families."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # `factory` is there before the families; the import of the package waits for that of another thread.
            return importlib.import_module("reasoning_gym").factory
    except ImportError as error:
        raise ValueError(f"task=reasoning_gym needs reasoning-gym ({error}): pip install -e '.[tasks]'") from error


def check_families(names: Sequence[str]) -> list[str]:
    """Return the names without spaces around them; raise ValueError for one that is unknown, named twice or refused."""
    names = [name.strip() for name in names]
    offered = [name for name in library().DATASETS if name not in REFUSED]
    for name in names:
        if name in REFUSED:
            raise ValueError(f"family {name}: {REFUSED[name]}")
        if name not in offered:
            similar = get_close_matches(name, offered, 5, 0.5)
            hint = f"did you mean {', '.join(similar)}?" if similar else f"choose of {', '.join(sorted(offered))}"
            raise ValueError(f"family {name!r} is unknown to reasoning-gym: {hint}")
    if len(set(names)) < len(names):
        raise ValueError(f"families={','.join(names)}: a family is named twice")
    return names


def make_dataset(family: str, settings: Mapping[str, Any], **options: Any) -> Any:
    """Return the library's data set of a family; `options` are `seed` and `size`. A bad setting raises ValueError."""
    try:
        return library().create_dataset(family, **settings, **options)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"family_config: {family}: {dict(settings)}: {error}") from error


def is_allowed(family: str, answer: str) -> bool:
    """Return whether a verifier may read an answer: it is not too long, and as `ALLOWED` says for the family."""
    pattern = ALLOWED.get(family)
    return len(answer) <= MAX_ANSWER_CHARS and (pattern is None or pattern.fullmatch(answer) is not None)
