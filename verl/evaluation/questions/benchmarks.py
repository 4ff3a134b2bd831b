"""The benchmarks: where users get the files of each, which fields they hold, and how it is asked and scored.

A task's `evaluation.py` registers its benchmarks (`register_benchmark`) and scores of its own
(`verl.evaluation.scores.scoring.register_scoring`). Files are .parquet, .jsonl, .json (a list of objects) or .csv with
the public set's own field names, without regard to case, or parquet files in verl's format (`prompt`,
`reward_model.ground_truth`). `loading` reads them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl.evaluation.questions import adapters
from verl.utils.parts import add_part, parts

HUB = "https://huggingface.co/datasets"


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
        decode: function that turns an encrypted row into a plain one; None if rows are plain.
        read_aliases: function that reads, from beside a data file, other names of the entity in a row's `answer_id`.
    """

    title: str
    get: str
    question: tuple[str, ...] = ("question",)
    answer: tuple[str, ...] = ("answer",)
    id: tuple[str, ...] = ("id",)
    scoring: str
    style: str
    read_question: Callable[[dict, tuple[str, ...]], str] = adapters.text_question
    read_answers: Callable[[dict, tuple[str, ...]], list[str]] = adapters.text_answers
    read_prompt: Callable[[str], str] = str
    read_truth: Callable[[Any], list[str]] = adapters.truth_answers
    left_out: Mapping[str, Callable[[dict], bool]] = field(default_factory=dict)
    decode: Callable[[dict], dict] | None = None
    read_aliases: Callable[[Path], dict[str, list[str]]] | None = None
    note: str = ""

    def fields(self) -> str:
        """Return the expected fields in words."""
        fields = {"question": self.question, "answer": self.answer, "id (optional)": self.id}
        return ", ".join(f"{name} in {' or '.join(names)}" for name, names in fields.items())


def register_benchmark(name: str, benchmark: Benchmark) -> Benchmark:
    """Register a benchmark under a name of lower-case letters and digits, by which users choose it."""
    return add_part("evaluation", name, benchmark)


def find_benchmark(name: str) -> Benchmark:
    """Return the benchmark with a name, without regard to case, spaces, - and _."""
    benchmarks = parts("evaluation")
    benchmark = benchmarks.get("".join(char for char in name.lower() if char not in "-_ "))
    if benchmark is None:
        raise ValueError(f"no benchmark {name!r}: choose one of {', '.join(benchmarks)}")
    return benchmark
