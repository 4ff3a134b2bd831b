"""Rows of public question sets as question and golden answers: one small function for each way they are written.

Readers take a row with lower-case keys and the names of the fields to look in, and raise `BadRow`.
"""

import base64
import json
import math
import re
from collections.abc import Iterable
from pathlib import Path

from verl.evaluation.questions import BOXED_INSTRUCTION, countdown_text
from verl.utils.data_files import BadRow, read_lines
from verl.utils.reward_score.math_equivalence import last_boxed
from verl.utils.reward_score.qa import gold_answers

# DAPO-Math-17k asks for a last line "Answer: ...", which the reward on \boxed does not look for
_DAPO_INSTRUCTIONS = re.compile(
    r"\ASolve the following math problem step by step\.[^\n]*\n+|\n+Remember to put your answer on its own line[^\n]*\Z"
)


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


def math_question(row: dict, names: tuple[str, ...] = ()) -> str:
    """The bare question, without anyone's instructions; `row` has lower-case keys.

    Raises:
        BadRow: there is none, or it needs an image.
    """
    question = next((row[key] for key in ("problem", "question", "prompt") if row.get(key)), None)
    if isinstance(question, list):  # messages
        users = [part["content"] for part in question if isinstance(part, dict) and part.get("role") == "user"]
        question = users[-1] if users else None
    if not isinstance(question, str) or not question.strip():
        raise BadRow("no question in problem, question or prompt")
    if any(key.startswith("image") and value for key, value in row.items()):
        raise BadRow("the question needs an image")
    question = _DAPO_INSTRUCTIONS.sub("", question.strip()).removesuffix(BOXED_INSTRUCTION).strip()
    context = row.get("context")
    return f"{context.strip()}\n{question}" if isinstance(context, str) and context.strip() else question


def math_answer(row: dict) -> str:
    """The answer as LaTeX without dollars, several joined by commas; `row` has lower-case keys.

    >>> math_answer({"final_answer": ["$1$", "$\\\\frac{1}{2}$"]}), math_answer({"answer": 142.0})
    ('1, \\\\frac{1}{2}', '142')

    Raises:
        BadRow: there is none.
    """
    reward_model = row.get("reward_model")
    ground_truth = reward_model.get("ground_truth") if isinstance(reward_model, dict) else None
    for answer in (ground_truth, row.get("final_answer"), row.get("answer")):
        parts = [_as_text(part) for part in (answer if isinstance(answer, list) else [answer])]
        if parts and all(parts):
            return ", ".join(parts)
    solution = row.get("solution")
    answer = last_boxed(solution) if isinstance(solution, str) else None
    if not answer or not answer.strip():
        raise BadRow("no answer in reward_model.ground_truth, final_answer, answer or a \\boxed of solution")
    return answer.strip()


def _as_text(answer) -> str:
    """Text of one answer; empty for none."""
    if isinstance(answer, float) and math.isfinite(answer):
        answer = int(answer) if answer.is_integer() else answer
    elif not isinstance(answer, str | int) or isinstance(answer, bool):
        return ""
    text = str(answer).strip()
    is_one_formula = len(text) > 1 and text[0] == text[-1] == "$" and "$" not in text[1:-1]
    return text[1:-1].strip() if is_one_formula else text


def math_answers(row: dict, names: tuple[str, ...], aliases: tuple[str, ...] = ()) -> list[str]:
    """The answer of `math_answer`, alone in a list."""
    return [math_answer(row)]


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
    return countdown_text(numbers, target, "+-*/", "long")


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
