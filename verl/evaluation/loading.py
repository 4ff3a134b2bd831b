"""Reads a benchmark's files into questions, and says what is wrong with them where it cannot."""

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from verl.evaluation.adapters import (
    countdown_answers,
    first_of,
    golds,
    math_answer,
    math_question,
    read_wikidata_aliases,
)
from verl.evaluation.benchmarks import Benchmark, find_benchmark
from verl.evaluation.questions import Question, to_messages
from verl.utils.data_files import BadRow, describe_bad, read_rows
from verl.utils.reward_score.tool_format import TOOL_TAGS

REPEATED = "asked before, word for word"
BAD = "bad rows"


@dataclass(frozen=True)
class QuestionSet:
    """The questions that a benchmark's files hold.

    Attributes:
        left_out: a reason why rows are no questions -> the number of these rows.
    """

    benchmark: Benchmark
    questions: list[Question]
    left_out: dict[str, int]


class _LeftOut(Exception):
    """A row that must not be asked; the message is the reason."""


@dataclass
class _Reading:
    """The state while a benchmark's files are read; row numbers go on from file to file."""

    benchmark: Benchmark
    where: Mapping[str, Collection]
    prompt_options: dict
    questions: dict[tuple, Question] = field(default_factory=dict)
    left_out: Counter = field(default_factory=Counter)
    bad: dict[int, str] = field(default_factory=dict)
    fields: set[str] = field(default_factory=set)
    n_rows: int = 0

    def read(self, path: Path) -> None:
        """Read a file's rows into `questions`, `left_out` and `bad`.

        Raises:
            ValueError: the file does not have this benchmark's fields.
        """
        fields: dict[str, str] = {}  # lower case -> as they are written
        aliases = self._aliases_beside(path)
        for row in read_rows(path):
            number, self.n_rows = self.n_rows, self.n_rows + 1
            try:
                if not isinstance(row, dict):
                    raise BadRow(f"expected an object, got {type(row).__name__}")
                fields |= {str(name).lower(): str(name) for name in row}
                self._add(self._question({str(name).lower(): value for name, value in row.items()}, number, aliases))
            except BadRow as error:
                self.bad[number] = str(error)
            except _LeftOut as reason:
                self.left_out[str(reason)] += 1
        self._check_fields(path, fields)
        self.fields |= fields.keys()

    def _aliases_beside(self, path: Path) -> dict[str, list[str]]:
        beside = path.parent / (self.benchmark.alias_file or "")
        return read_wikidata_aliases(beside) if self.benchmark.alias_file and beside.is_file() else {}

    def _add(self, question: Question) -> None:
        key = (json.dumps(question.prompt), *question.answers)
        if key in self.questions:
            raise _LeftOut(REPEATED)
        self.questions[key] = question

    def _question(self, row: dict, number: int, aliases: dict[str, list[str]]) -> Question:
        """The question of a row.

        Raises:
            BadRow, _LeftOut: the row is no question.
        """
        benchmark = self.benchmark
        for reason in _reasons_against(benchmark, row, self.where):
            raise _LeftOut(reason)
        if is_verl_row(row):
            return Question(str(number), *_verl_parts(benchmark, row), meta=_meta(benchmark, row))
        row = benchmark.decode(row) if benchmark.decode else row
        text = benchmark.read_question(row, benchmark.question)
        answers = benchmark.read_answers(row, benchmark.answer, benchmark.aliases)
        answers += [name for name in aliases.get(row.get("answer_id"), ()) if name not in answers]
        own_id = first_of(row, benchmark.id)
        return Question(
            str(number if own_id is None else own_id),
            text,
            to_messages(text, **self.prompt_options),
            answers,
            _meta(benchmark, row),
        )

    def _check_fields(self, path: Path, fields: dict[str, str]) -> None:
        def has(names: tuple[str, ...]) -> bool:
            return any(name.lower() in fields for name in names)

        if is_verl_row(fields) or (has(self.benchmark.question) and has(self.benchmark.answer)):
            return
        raise ValueError(
            f"{path} is no file of {self.benchmark.title}. Expected: {self.benchmark.fields()}; or prompt and "
            f"reward_model (verl's format). Found: {', '.join(fields.values()) or 'no rows'}"
        )


def is_verl_row(row: Mapping) -> bool:
    """Whether a row (or a table of fields) is in verl's format."""
    return "prompt" in row and "reward_model" in row


def _reasons_against(benchmark: Benchmark, row: dict, where: Mapping[str, Collection]) -> Iterator[str]:
    for reason, holds in benchmark.left_out.items():
        if holds(row):
            yield reason
    for name, values in where.items():
        if str(_value(row, name)) not in {str(value) for value in values}:
            yield f"{name} is not {' or '.join(map(str, values))}"


def _value(row: dict, name: str):
    """The value of a field, or of a part of it, such as `info.lang`."""
    top, *parts = name.split(".")
    value = row.get(top.lower())
    for part in parts:
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _meta(benchmark: Benchmark, row: dict) -> dict:
    return {name: row[name.lower()] for name in benchmark.meta if row.get(name.lower()) is not None}


def _verl_parts(benchmark: Benchmark, row: dict) -> tuple[str, list[dict], list[str]]:
    """The text, prompt and answers of a row in verl's format, whose prompt is asked without changes.

    Raises:
        BadRow: the prompt is no list of messages, or there is no ground truth.
    """
    prompt = row["prompt"]
    messages = prompt if isinstance(prompt, list) else []
    if not messages or not all(isinstance(part, dict) and isinstance(part.get("content"), str) for part in messages):
        raise BadRow("prompt is no list of messages with role and content")
    prompt = [{"role": part.get("role"), "content": part["content"]} for part in messages]
    text = next((part["content"].strip() for part in reversed(prompt) if part["role"] == "user"), "")
    if not text:
        raise BadRow("no message of a user in prompt")
    text = math_question({"prompt": prompt}) if benchmark.scoring == "math" else text
    return text, prompt, _verl_answers(benchmark, row["reward_model"])


def _verl_answers(benchmark: Benchmark, reward_model) -> list[str]:
    truth = reward_model.get("ground_truth") if isinstance(reward_model, dict) else None
    if benchmark.scoring == "math":
        return [math_answer({"reward_model": {"ground_truth": truth}})]
    if benchmark.scoring == "countdown":
        return countdown_answers(_as_object(truth), ())
    if truth is None:
        raise BadRow("no answer in reward_model.ground_truth")
    return golds([truth["target"] if isinstance(truth, dict) and "target" in truth else truth])


def _as_object(truth) -> dict:
    try:
        truth = json.loads(truth) if isinstance(truth, str) else truth
    except ValueError:
        truth = None
    return truth if isinstance(truth, dict) else {}


def read_questions(
    name: str,
    files: Sequence[str | Path],
    *,
    where: Mapping[str, Collection] | None = None,
    style: str | None = None,
    tool_tags: Iterable[str] = TOOL_TAGS,
    system: str | None = None,
    skip_bad_rows: bool = False,
) -> QuestionSet:
    """The questions in a benchmark's files, in order. A question that is repeated with the same answers is asked once.

    Args:
        name: of the benchmark, see `find_benchmark`.
        files: all files of the benchmark.
        where: field -> allowed values, such as `{"Level": [1, 2]}` or `{"info.lang": ["en"]}`; other rows are left out.
        style, tool_tags, system: see `questions.to_messages`; a style of None is the benchmark's. Rows in verl's format
            keep their own prompts.
        skip_bad_rows: leave out rows that cannot be read, instead of raising.

    Raises:
        ValueError: there is no such benchmark or style; a file is missing, damaged or has other fields (the message
            names the file, the expected fields and the fields it has); rows are bad (the message gives their numbers
            from 0); there are no questions; two questions have the same id.
    """
    benchmark = find_benchmark(name)
    if not files:
        raise ValueError(f"{name}: no files; get them from {benchmark.get}")
    prompt_options = {"style": style or benchmark.style, "tool_tags": tuple(tool_tags), "system": system}
    to_messages("", **prompt_options)  # raises for an unknown style before any row is read
    reading = _Reading(benchmark, where or {}, prompt_options)
    for file in files:
        reading.read(Path(file))
    names = ", ".join(map(str, files))
    if reading.bad and not skip_bad_rows:
        raise ValueError(f"{names}: {describe_bad(reading.bad)}; skip_bad_rows leaves them out")
    if absent := [field for field in reading.where if field.split(".")[0].lower() not in reading.fields]:
        raise ValueError(f"{names}: no field {', '.join(absent)} to choose rows by; found {sorted(reading.fields)}")
    left_out = dict(reading.left_out) | ({BAD: len(reading.bad)} if reading.bad else {})
    questions = list(reading.questions.values())
    if not questions:
        raise ValueError(f"{names}: no questions to ask; left out: {left_out}")
    ids = Counter(question.id for question in questions)
    if repeated := [question_id for question_id, count in ids.items() if count > 1]:
        raise ValueError(f"{names}: more than one question has the id {', '.join(repeated[:5])}")
    return QuestionSet(benchmark, questions, left_out)
