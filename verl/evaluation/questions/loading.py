"""Reads a benchmark's files into questions, and reports what is wrong with files that it cannot read."""

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from verl.evaluation.questions.benchmarks import Benchmark, find_benchmark, first_of, last_question
from verl.evaluation.questions.prompts import Question, to_messages
from verl.utils.data_files import BadRow, describe_bad, read_rows
from verl.utils.reward_score.tool_format import TOOL_TAGS

REPEATED = "asked before, word for word"


class QuestionSet(NamedTuple):
    """The questions that a benchmark's files hold."""

    benchmark: Benchmark
    questions: list[Question]
    left_out: dict[str, int]  # a reason for leaving rows out -> the number of these rows


def _is_verl_row(fields: Iterable[str]) -> bool:
    return {"prompt", "reward_model"} <= set(fields)


def _question(benchmark: Benchmark, row: dict, number: int, prompt: dict) -> Question:
    """Return the question in a row with lower-case keys, or raise BadRow; `prompt` holds options of `to_messages`."""
    if _is_verl_row(row):
        task = (row.get("extra_info") or {}).get("environment")
        return Question(str(number), *_verl_parts(benchmark, row), task)
    text = benchmark.read_question(row, benchmark.question)
    answers = benchmark.read_answers(row, benchmark.answer)
    own_id = first_of(row, benchmark.id)
    return Question(str(number if own_id is None else own_id), text, to_messages(text, **prompt), answers)


def _verl_parts(benchmark: Benchmark, row: dict) -> tuple[str, list[dict], list[str]]:
    """Return the text, prompt and answers of a row in verl's format, whose prompt is used without changes."""
    messages = row["prompt"] if isinstance(row["prompt"], list) else []
    if not messages or not all(isinstance(part, dict) and isinstance(part.get("content"), str) for part in messages):
        raise BadRow("prompt is no list of messages with role and content")
    text = (last_question(messages) or "").strip()
    if not text:
        raise BadRow("no message of a user in prompt")
    prompt = [{"role": part.get("role"), "content": part["content"]} for part in messages]
    truth = row["reward_model"].get("ground_truth") if isinstance(row["reward_model"], dict) else None
    return benchmark.read_prompt(text), prompt, benchmark.read_truth(truth)


def _check_fields(benchmark: Benchmark, path: Path, fields: Mapping[str, str]) -> None:
    """Raise ValueError if `fields` (lower case -> original spelling) are not the benchmark's."""
    has_both = all(any(name.lower() in fields for name in names) for names in (benchmark.question, benchmark.answer))
    if not has_both and not _is_verl_row(fields):
        raise ValueError(
            f"{path} is no file of {benchmark.title}. Expected: {benchmark.fields()}; or prompt and reward_model "
            f"(verl's format). Found: {', '.join(fields.values()) or 'no rows'}"
        )


def _rows(benchmark: Benchmark, files: Sequence) -> Iterator[tuple[int, dict]]:
    """Yield each row's number, and the row with lower-case keys."""
    numbers = itertools.count()
    for path in map(Path, files):
        fields: dict[str, str] = {}  # lower case -> original spelling
        for row in read_rows(path):
            if isinstance(row, dict):
                fields |= {str(name).lower(): str(name) for name in row}
                row = {str(name).lower(): value for name, value in row.items()}
            yield next(numbers), row
        _check_fields(benchmark, path, fields)


def read_questions(
    name: str,
    files: Sequence[str | Path],
    *,
    style: str | None = None,
    tool_tags: Sequence[str] = TOOL_TAGS,
    system: str | None = None,
) -> QuestionSet:
    """Return the questions in a benchmark's files, in order, without repeats of prompt, task and answers.

    `style`, `tool_tags` and `system` are those of `to_messages`; a style of None is the benchmark's. Rows in verl's
    format keep their own prompts.
    """
    benchmark = find_benchmark(name)
    if not files:
        raise ValueError(f"{name}: no files; get them from {benchmark.get}")
    prompt: dict[str, Any] = {"style": style or benchmark.style, "tool_tags": tool_tags, "system": system}
    to_messages("", **prompt)  # This raises for an unknown style before any row is read.
    questions: dict[tuple, Question] = {}
    left_out: Counter[str] = Counter()
    bad: dict[int, str] = {}
    for number, row in _rows(benchmark, files):
        try:
            if not isinstance(row, dict):
                raise BadRow(f"expected an object, got {type(row).__name__}")
            if reason := next((reason for reason, holds in benchmark.left_out.items() if holds(row)), None):
                left_out[reason] += 1
                continue
            question = _question(benchmark, row, number, prompt)
        except ValueError as error:
            bad[number] = str(error)
            continue
        key = (json.dumps([question.prompt, question.task], default=str), *question.answers)
        if questions.setdefault(key, question) is not question:
            left_out[REPEATED] += 1
    names = ", ".join(map(str, files))
    if bad:
        raise ValueError(f"{names}: {describe_bad(bad)}")
    if not questions:
        raise ValueError(f"{names}: no questions to ask; left out: {dict(left_out)}")
    ids = Counter(question.id for question in questions.values())
    if repeated := [question_id for question_id, count in ids.items() if count > 1]:
        raise ValueError(f"{names}: more than one question has the id {', '.join(repeated[:5])}")
    return QuestionSet(benchmark, list(questions.values()), dict(left_out))
