"""Readers of questions and golden answers for the rows of any benchmark; a task adds those of its own layouts.

A reader takes a row with lower-case keys and the names of the fields to look in. It raises `BadRow` for a row that it
cannot read.
"""

import json
from collections.abc import Iterable

from verl.utils.data_files import BadRow
from verl.utils.reward_score.qa import gold_answers


def first_of(row: dict, names: Iterable[str]):
    """Return the value of the first field that is not empty, None if all are empty; 0 counts as not empty."""
    values = (row.get(name.lower()) for name in names)
    return next((value for value in values if value is not None and value != "" and value != []), None)


def text_question(row: dict, names: tuple[str, ...]) -> str:
    """Return the text in the first field that is not empty."""
    question = first_of(row, names)
    if not isinstance(question, str) or not question.strip():
        raise BadRow(f"no question in {' or '.join(names)}")
    return question.strip()


def text_answers(row: dict, names: tuple[str, ...]) -> list[str]:
    """Return the golden answers in the first field that is not empty: a text, a number or a list of these.

    >>> text_answers({"answer": "[1, 2]"}, ("answer",)), text_answers({"answer": ["Paris", "Lutetia"]}, ("answer",))
    (['[1, 2]'], ['Paris', 'Lutetia'])
    """
    if (answer := first_of(row, names)) is None:
        raise BadRow(f"no answer in {' or '.join(names)}")
    return golds(answer if isinstance(answer, list) else [answer])


def golds(truth) -> list[str]:
    """Return the golden answers that `qa.gold_answers` reads from `truth`, without repeats."""
    try:
        return list(dict.fromkeys(gold.strip() for gold in gold_answers(truth)))
    except ValueError as error:
        raise BadRow(str(error).replace("ground_truth", "the answer")) from error


def truth_answers(truth) -> list[str]:
    """Return the golden answers in a ground truth in verl's format, which may hold them as its `target`."""
    if truth is None:
        raise BadRow("no answer in reward_model.ground_truth")
    return golds(truth["target"] if isinstance(truth, dict) and "target" in truth else truth)


def truth_row(truth) -> dict:
    """Return a ground truth that is an object, or its JSON text, as a row; anything else becomes an empty row."""
    try:
        row = json.loads(truth) if isinstance(truth, str) else truth
    except ValueError:
        row = None
    return row if isinstance(row, dict) else {}


def last_question(messages: list) -> str | None:
    """Return the text of the user's last message; None if there is none."""
    users = [part["content"] for part in messages if isinstance(part, dict) and part.get("role") == "user"]
    return users[-1] if users else None


def needs_image(row: dict) -> bool:
    """Return whether the question needs a picture.

    It does if a field like `image` (HLE) or `image_1` (OlympiadBench) is not empty, or `modality` is `multimodal`.
    """
    pictures = (value for name, value in row.items() if name.startswith("image") and name != "image_preview")
    return any(pictures) or str(row.get("modality", "")).lower() == "multimodal"
