"""Turns rows of public question sets into questions and golden answers, with a small function for each layout.

A reader takes a row with lower-case keys and the names of the fields to look in. It raises `BadRow` for a row that it
cannot read.
"""

import base64
import itertools
import json
import math
import re
from collections.abc import Iterable
from pathlib import Path

from verl.evaluation.questions.prompts import BOXED_INSTRUCTION, countdown_text, walk_text
from verl.utils.data_files import BadRow, read_lines
from verl.utils.math_answers.comparison import last_boxed, without_dollars
from verl.utils.reward_score.qa import gold_answers

# DAPO-Math-17k asks for a last line "Answer: ...", but the reward reads \boxed only.
_DAPO_INSTRUCTIONS = re.compile(
    r"\ASolve the following math problem step by step\.[^\n]*\n+|\n+Remember to put your answer on its own line[^\n]*\Z"
)


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


def musique_answers(row: dict, names: tuple[str, ...]) -> list[str]:
    """Return the answer and its aliases.

    >>> musique_answers({"answer": "Paris", "answer_aliases": ["Lutetia", "Paris"]}, ("answer",))
    ['Paris', 'Lutetia']
    """
    aliases = first_of(row, ["answer_aliases"]) or []
    return golds([*text_answers(row, names), *(aliases if isinstance(aliases, list) else [aliases])])


def math_question(row: dict, names: tuple[str, ...] = ()) -> str:
    """Return the bare question in `problem`, `question` or `prompt`, without instructions on how to answer.

    A text in the field `context` (OlympiadBench) is put before it. These fields are fixed: `names` is not used.
    """
    question = next((row[key] for key in ("problem", "question", "prompt") if row.get(key)), None)
    if isinstance(question, list):
        question = last_question(question)
    if not isinstance(question, str) or not question.strip():
        raise BadRow("no question in problem, question or prompt")
    if any(key.startswith("image") and value for key, value in row.items()):
        raise BadRow("the question needs an image")
    question = _DAPO_INSTRUCTIONS.sub("", question.strip()).removesuffix(BOXED_INSTRUCTION).strip()
    context = row.get("context")
    return f"{context.strip()}\n{question}" if isinstance(context, str) and context.strip() else question


def last_question(messages: list) -> str | None:
    """Return the text of the user's last message; None if there is none."""
    users = [part["content"] for part in messages if isinstance(part, dict) and part.get("role") == "user"]
    return users[-1] if users else None


def math_answer(row: dict) -> str:
    """Return the answer of a row of mathematics as LaTeX without dollar signs; commas join several answers.

    >>> math_answer({"final_answer": ["$1$", "$\\\\frac{1}{2}$"]}), math_answer({"answer": 142.0})
    ('1, \\\\frac{1}{2}', '142')
    >>> math_answer({"question": "How many?", "answer": "40 * 27 = 1080 #### 1,080"})
    '1080'
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
    """Return an answer as text; empty if it is neither text nor a number."""
    if isinstance(answer, float) and math.isfinite(answer):
        answer = int(answer) if answer.is_integer() else answer
    elif not isinstance(answer, str | int) or isinstance(answer, bool):
        return ""
    text = str(answer).strip()
    return _gsm8k_number(text) if "####" in text else without_dollars(text)


def _gsm8k_number(solution: str) -> str:
    return solution.rpartition("####")[2].strip().replace(",", "")


def gsm8k_answers(row: dict, names: tuple[str, ...]) -> list[str]:
    """Return the number that follows #### at the end of a solution, as the only golden answer.

    >>> gsm8k_answers({"answer": "40 * 27 = 1080 #### 1,080"}, ("answer",))
    ['1080']
    """
    solution = first_of(row, names)
    answer = _gsm8k_number(str("" if solution is None else solution))
    if len(answer.split()) != 1:
        raise BadRow(f"no number after #### in {' or '.join(names)}")
    return [answer]


def countdown_question(row: dict, names: tuple[str, ...]) -> str:
    """Return the question in this project's words, as the public set has numbers only."""
    problem = json.loads(countdown_answers(row, names)[0])
    return countdown_text(problem["numbers"], problem["target"], "+-*/", "long")


def countdown_answers(row: dict, names: tuple[str, ...]) -> list[str]:
    """Return the ground truth that `reward_score.countdown` takes, as JSON.

    >>> countdown_answers({"nums": [3, 4], "target": 7}, ())
    ['{"target": 7, "numbers": [3, 4]}']
    """
    numbers, target = row.get("nums") or row.get("numbers"), row.get("target")
    if not isinstance(numbers, list) or not all(type(number) is int for number in [*numbers, target]):
        raise BadRow("no whole numbers in nums (or numbers) and target")
    return [json.dumps({"target": target, "numbers": numbers})]


def walk_question(row: dict, names: tuple[str, ...]) -> str:
    """Return the question in this project's words, with full instructions."""
    return walk_text(json.loads(walk_answers(row, names)[0]), "long")


def walk_answers(row: dict, names: tuple[str, ...]) -> list[str]:
    """Return the ground truth that `reward_score.walk` takes, as JSON.

    >>> walk_answers({"start": 3, "target": 8, "steps": 1, "operations": ["+5", "*2"], "limit": 99}, ())
    ['{"start": 3, "target": 8, "steps": 1, "limit": 99, "operations": ["+5", "*2"]}']
    """
    numbers = {name: row.get(name) for name in ("start", "target", "steps", "limit")}
    operations = row.get("operations")
    are_numbers = all(type(number) is int for number in numbers.values())
    if not are_numbers or not isinstance(operations, list) or not all(isinstance(text, str) for text in operations):
        raise BadRow("no whole numbers in start, target, steps and limit, or no texts in operations")
    return [json.dumps(numbers | {"operations": operations})]


def needs_image(row: dict) -> bool:
    """Return whether the question needs a picture.

    It does if a field like `image` (HLE) or `image_1` (OlympiadBench) is not empty, or `modality` is `multimodal`.
    """
    pictures = (value for name, value in row.items() if name.startswith("image") and name != "image_preview")
    return any(pictures) or str(row.get("modality", "")).lower() == "multimodal"


def decode_xbench(row: dict) -> dict:
    """Return a row of xbench in plain text: in the published files its `canary` encrypts `prompt` and `answer`.

    The UTF-8 bytes of the text are combined by XOR with the repeated bytes of the canary, and the result is encoded as
    base64; xbench_evals.py of https://github.com/xbench-ai/xbench-evals decodes it. A row without a canary is plain.
    """
    if not row.get("canary"):
        return row
    if not all(isinstance(row.get(name), str) for name in ("prompt", "answer", "canary")):
        raise BadRow("expected text in prompt, answer and canary")
    return row | {name: _decrypt(row[name], row["canary"].encode()) for name in ("prompt", "answer")}


def _decrypt(text: str, key: bytes) -> str:
    try:
        secret = base64.b64decode(text, validate=True)
        return bytes(byte ^ key_byte for byte, key_byte in zip(secret, itertools.cycle(key), strict=False)).decode()
    except ValueError as error:
        raise BadRow(
            "prompt or answer is not encrypted by canary; where it is plain already, leave the canary out"
        ) from error


def read_wikidata_aliases(path: Path) -> dict[str, list[str]]:
    """Return Wikidata id -> names of the entity, from 2WikiMultihopQA's id_aliases.json (a JSON object on each line).

    Raises:
        ValueError: a line is damaged; the message names the file and the line.
    """
    names = {}
    for number, row in enumerate(read_lines(path), start=1):
        aliases, demonyms = row.get("aliases"), row.get("demonyms", [])
        if not isinstance(row.get("Q_id"), str) or not isinstance(aliases, list) or not isinstance(demonyms, list):
            raise ValueError(f"{path}, row {number}: expected Q_id and lists aliases and demonyms, got {sorted(row)}")
        names[row["Q_id"]] = [*aliases, *demonyms]
    return names
