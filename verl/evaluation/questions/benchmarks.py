"""The benchmarks: where users get the files of each, which fields they hold, and how it is asked and scored.

A task's `evaluation.py` registers its benchmarks (`register_benchmark`) and scores of its own
(`verl.evaluation.scores.scoring.register_scoring`). Files are .parquet, .jsonl, .json (a list of objects) or .csv with
the public set's own field names, without regard to case, or parquet files in verl's format (`prompt`,
`reward_model.ground_truth`). `loading` reads them.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from verl.utils.data_files import BadRow
from verl.utils.parts import add_part, parts
from verl.utils.reward_score.qa import gold_answers

HUB = "https://huggingface.co/datasets"


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
    """Return whether a field like `image` (HLE) or `image_1` (OlympiadBench) is not empty, or `modality` is
    `multimodal`."""
    pictures = (value for name, value in row.items() if name.startswith("image") and name != "image_preview")
    return any(pictures) or str(row.get("modality", "")).lower() == "multimodal"


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A benchmark with the published names of its fields. Of several names, a row's first non-empty field is read.

    Attributes:
        get: address or command from which users get the files.
        question, answer, id: names of fields. A row without an id gets its row number in the files, from 0, as id.
        scoring, style: a registered scoring, and a style of `prompts.to_messages`.
        read_question, read_answers: functions that read a row's question and golden answers.
        read_prompt: function that returns the bare question in the text of a prompt in verl's format.
        read_truth: function that returns the golden answers in a ground truth in verl's format, which may be None.
        left_out: a reason why a row is no question for a text model -> a function that returns whether it holds for a
            row. Such rows are counted and not asked.
    """

    title: str
    get: str
    question: tuple[str, ...] = ("question",)
    answer: tuple[str, ...] = ("answer",)
    id: tuple[str, ...] = ("id",)
    scoring: str
    style: str = "plain"
    read_question: Callable[[dict, tuple[str, ...]], str] = text_question
    read_answers: Callable[[dict, tuple[str, ...]], list[str]] = text_answers
    read_prompt: Callable[[str], str] = str
    read_truth: Callable[[Any], list[str]] = truth_answers
    left_out: Mapping[str, Callable[[dict], bool]] = field(default_factory=dict)
    note: str = ""

    def fields(self) -> str:
        """Return the expected fields in words."""
        fields = {"question": self.question, "answer": self.answer, "id (optional)": self.id}
        return ", ".join(f"{name} in {' or '.join(names)}" for name, names in fields.items())


def register_benchmark(name: str, title: str, get: str, **options: Any) -> Benchmark:
    """Register a `Benchmark` under a name of lower-case letters and digits, by which users choose it."""
    return add_part("evaluation", name, Benchmark(title=title, get=get, **options))


def find_benchmark(name: str) -> Benchmark:
    """Return the benchmark with a name, without regard to case, spaces, - and _."""
    benchmarks = parts("evaluation")
    benchmark = benchmarks.get("".join(char for char in name.lower() if char not in "-_ "))
    if benchmark is None:
        raise ValueError(f"no benchmark {name!r}: choose one of {', '.join(benchmarks)}")
    return benchmark
