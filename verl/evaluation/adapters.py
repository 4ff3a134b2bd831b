"""Rows of public question sets as question and golden answers: one small function for each way they are written.

Readers take a row with lower-case keys and the names of the fields to look in, and raise `BadRow`.
"""

import base64
import json
from collections.abc import Iterable
from pathlib import Path

from recipe.common import countdown, math_data
from verl.utils.data_files import BadRow, read_lines
from verl.utils.reward_score.qa import gold_answers


def first_of(row: dict, names: Iterable[str]):
    """Value of the first field that is not empty; None for none. 0 is a value."""
    values = (row.get(name.lower()) for name in names)
    return next((value for value in values if value is not None and value != "" and value != []), None)


def text_question(row: dict, names: tuple[str, ...]) -> str:
    """The text in the first of the fields.

    Raises:
        BadRow: there is none.
    """
    question = first_of(row, names)
    if not isinstance(question, str) or not question.strip():
        raise BadRow(f"no question in {' or '.join(names)}")
    return question.strip()


def text_answers(row: dict, names: tuple[str, ...], aliases: tuple[str, ...] = ()) -> list[str]:
    """Golden answers of the first of the fields, then those of all fields in `aliases`, each once.

    >>> text_answers({"answer": "Paris", "other": ["Lutetia", "Paris"]}, ("answer",), ("other",))
    ['Paris', 'Lutetia']

    Raises:
        BadRow: there is no answer, or it is no text or number.
    """
    if (answer := first_of(row, names)) is None:
        raise BadRow(f"no answer in {' or '.join(names)}")
    values = [answer, *(first_of(row, [alias]) for alias in aliases)]
    # as lists, since of the text "[1, 2]" gold_answers would make two answers
    return golds([value if isinstance(value, list) else [value] for value in values if value is not None])


def golds(values: Iterable) -> list[str]:
    """The golden answers in values as `qa.gold_answers` takes them, each once.

    Raises:
        BadRow: one holds none.
    """
    try:
        found = [gold.strip() for value in values for gold in gold_answers(value)]
    except ValueError as error:
        raise BadRow(str(error).replace("ground_truth", "the answer")) from error
    return list(dict.fromkeys(found))


def math_question(row: dict, names: tuple[str, ...]) -> str:
    """See `math_data.question_of`."""
    return math_data.question_of(row)


def math_answers(row: dict, names: tuple[str, ...], aliases: tuple[str, ...] = ()) -> list[str]:
    """One answer, see `math_data.answer_of`."""
    return [math_data.answer_of(row)]


def gsm8k_answers(row: dict, names: tuple[str, ...], aliases: tuple[str, ...] = ()) -> list[str]:
    """The number behind ####, where the solution stands in front of it.

    >>> gsm8k_answers({"answer": "40 * 27 = 1080 #### 1,080"}, ("answer",))
    ['1080']

    Raises:
        BadRow: there is none.
    """
    solution = first_of(row, names)
    answer = str("" if solution is None else solution).rpartition("####")[2].strip().replace(",", "")
    if len(answer.split()) != 1:
        raise BadRow(f"no number after #### in {' or '.join(names)}")
    return [answer]


def gaia_answers(row: dict, names: tuple[str, ...], aliases: tuple[str, ...] = ()) -> list[str]:
    """`text_answers`, but for the ? that stands in place of the answers that GAIA keeps to itself.

    Raises:
        BadRow: there is no answer.
    """
    answers = text_answers(row, names)
    if answers == ["?"]:
        raise BadRow("the answer is ?: GAIA keeps the answers of its test split, use the validation split")
    return answers


def countdown_question(row: dict, names: tuple[str, ...]) -> str:
    """Our words for it: the public set has numbers only.

    Raises:
        BadRow: there are no whole numbers.
    """
    numbers, target = _countdown_problem(row)
    return countdown.question(numbers, target, "+-*/", "long")


def countdown_answers(row: dict, names: tuple[str, ...], aliases: tuple[str, ...] = ()) -> list[str]:
    """The ground truth of `reward_score.countdown` as JSON.

    >>> countdown_answers({"nums": [3, 4], "target": 7}, ())
    ['{"target": 7, "numbers": [3, 4]}']

    Raises:
        BadRow: there are no whole numbers.
    """
    numbers, target = _countdown_problem(row)
    return [json.dumps({"target": target, "numbers": numbers})]


def _countdown_problem(row: dict) -> tuple[list[int], int]:
    numbers, target = row.get("nums") or row.get("numbers"), row.get("target")
    if not isinstance(numbers, list) or not all(type(number) is int for number in [*numbers, target]):
        raise BadRow("no whole numbers in nums (or numbers) and target")
    return numbers, target


def needs_image(row: dict) -> bool:
    """Whether the question is about a picture: HLE's `image`, OlympiadBench's `image_1`, … and `modality`."""
    pictures = (value for name, value in row.items() if name.startswith("image") and name != "image_preview")
    return any(pictures) or str(row.get("modality", "")).lower() == "multimodal"


def decode_xbench(row: dict) -> dict:
    """A row of xbench as plain text: `prompt` and `answer` are encrypted by the row's `canary`.

    They are base64 of the UTF-8 bytes, each XOR the canary's bytes, over and over: what xbench_evals.py of
    https://github.com/xbench-ai/xbench-evals undoes. A row without a canary is taken as plain.

    Raises:
        BadRow: the canary has encrypted no such text.
    """
    if not row.get("canary"):
        return row
    fields = {name: row.get(name) for name in ("prompt", "answer", "canary")}
    if not all(isinstance(value, str) for value in fields.values()):
        raise BadRow("expected text in prompt, answer and canary")
    return {**row, **{name: _decrypt(fields[name], fields["canary"]) for name in ("prompt", "answer")}}


def _decrypt(text: str, canary: str) -> str:
    key = canary.encode()
    try:
        secret = base64.b64decode(text, validate=True)
        return bytes(byte ^ key[place % len(key)] for place, byte in enumerate(secret)).decode()
    except ValueError as error:
        raise BadRow(
            "prompt or answer is not encrypted by canary; where it is plain already, leave the canary out"
        ) from error


def read_wikidata_aliases(path: Path) -> dict[str, list[str]]:
    """Names of entities by Wikidata id, from 2WikiMultihopQA's id_aliases.json (one object on each line).

    Raises:
        ValueError: a damaged line; the message names file and line.
    """
    names = {}
    for number, row in enumerate(read_lines(path), start=1):
        aliases, demonyms = row.get("aliases"), row.get("demonyms", [])
        if not isinstance(row.get("Q_id"), str) or not isinstance(aliases, list) or not isinstance(demonyms, list):
            raise ValueError(f"{path}, row {number}: expected Q_id and lists aliases and demonyms, got {sorted(row)}")
        names[row["Q_id"]] = [*aliases, *demonyms]
    return names
