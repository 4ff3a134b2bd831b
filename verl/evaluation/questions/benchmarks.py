"""The benchmarks: where users get the files of each, which fields they hold, and how it is asked and scored.

Files are .parquet, .jsonl, .json (a list of objects) or .csv with the public set's own field names, without regard to
case, or parquet files in verl's format (`prompt`, `reward_model.ground_truth`). `loading` reads them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from verl.evaluation.questions import adapters

SCORINGS = {
    "math": "the last \\boxed against the answer by math-verify",
    "qa": "exact match and token F1 with the best golden answer",
    "judge": "a language model compares it with the golden answers",
    "countdown": "exact arithmetic",
    "walk": "exact arithmetic, line by line",
    "number": "the last number of the last \\boxed, or of the response, exactly",
}
HUB = "https://huggingface.co/datasets"


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A benchmark with the published names of its fields. Of several names, a row's first non-empty field is read.

    Attributes:
        get: address or command from which users get the files.
        question, answer, id: names of fields. A row without an id gets its row number in the files, from 0, as id.
        scoring: a key of SCORINGS.
        style: style of the prompt, see `questions.to_messages`.
        read_question, read_answers: functions from `adapters` that read a row's question and golden answers.
        left_out: a reason why a row is no question for a text model -> a function that returns whether it holds for a
            row. Such rows are counted and not asked.
        decode: function that turns an encrypted row into a plain one; None if rows are plain.
        alias_file: 2WikiMultihopQA's file with the names of `answer_id`; it is read if it lies beside the data.
        note: further information for users.
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
    left_out: Mapping[str, Callable[[dict], bool]] = field(default_factory=dict)
    decode: Callable[[dict], dict] | None = None
    alias_file: str | None = None
    note: str = ""

    def fields(self) -> str:
        """Return the expected fields in words."""
        fields = {"question": self.question, "answer": self.answer, "id (optional)": self.id}
        return ", ".join(f"{name} in {' or '.join(names)}" for name, names in fields.items())


def _maths(title: str, get: str, **options) -> Benchmark:
    """Return a benchmark of mathematics: the model boxes its answer, and published solutions box theirs."""
    fields: dict[str, Any] = {
        "question": ("problem", "question"),
        "answer": ("answer", "solution"),
        "read_question": adapters.math_question,
        "read_answers": lambda row, names: [adapters.math_answer(row)],
        "left_out": {"needs an image": adapters.needs_image},
    }
    return Benchmark(title=title, get=get, scoring="math", style="boxed", **(fields | options))


def _searches(title: str, get: str, scoring: str, **options) -> Benchmark:
    """Return a benchmark of questions that models answer with tools, between tags."""
    return Benchmark(title=title, get=get, scoring=scoring, style="answer", **options)


BENCHMARKS: dict[str, Benchmark] = {
    "aime24": _maths("AIME24", f"{HUB}/HuggingFaceH4/aime_2024 or {HUB}/math-ai/aime24"),
    "aime25": _maths("AIME25", f"{HUB}/math-ai/aime25 or {HUB}/MathArena/aime_2025", id=("id", "problem_idx")),
    "math500": _maths("MATH500", f"{HUB}/HuggingFaceH4/MATH-500", id=("unique_id",)),
    "gsm8k": _maths(
        "GSM8K",
        f"{HUB}/openai/gsm8k (main, test)",
        question=("question",),
        answer=("answer",),
        read_question=adapters.text_question,
        read_answers=adapters.gsm8k_answers,
        note="answer is the solution, then #### and the number",
    ),
    "math": _maths("MATH", f"{HUB}/EleutherAI/hendrycks_math (the test files of all seven subjects, together)"),
    "webwalkerqa": _searches("WebWalkerQA", f"{HUB}/callanwu/WebWalkerQA (main)", "judge"),
    "hotpotqa": _searches(
        "HotpotQA",
        f"https://hotpotqa.github.io (hotpot_dev_distractor_v1.json) or {HUB}/hotpotqa/hotpot_qa (validation)",
        "qa",
        answer=("answer", "golden_answers"),
        id=("_id", "id"),
    ),
    "2wikimultihopqa": _searches(
        "2WikiMultihopQA",
        "https://github.com/Alab-NII/2wikimultihop (data_ids_april7.zip: dev.json and id_aliases.json)",
        "qa",
        answer=("answer", "golden_answers"),
        id=("_id", "id"),
        alias_file="id_aliases.json",
        note="with id_aliases.json beside it an entity's other names are right, as in the authors' script 1.1",
    ),
    "musique": _searches(
        "MuSiQue",
        f"https://github.com/StonyBrookNLP/musique (musique_ans_v1.0_dev.jsonl) or {HUB}/dgslibisey/MuSiQue",
        "qa",
        answer=("answer", "golden_answers"),
        read_answers=adapters.musique_answers,
        left_out={"has no answer": lambda row: row.get("answerable") is False},
        note="answer_aliases are right, too",
    ),
    "bamboogle": _searches(
        "Bamboogle", f"{HUB}/chiayewken/bamboogle", "qa", question=("Question",), answer=("Answer", "golden_answers")
    ),
    "gaia": _searches(
        "GAIA",
        f"{HUB}/gaia-benchmark/GAIA (2023/validation/metadata.parquet; access on request)",
        "judge",
        question=("Question",),
        answer=("Final answer", "answer"),
        id=("task_id",),
        left_out={
            "comes with a file": lambda row: bool(row.get("file_name")),
            "has no public answer: use the validation split": lambda row: (
                str(adapters.first_of(row, ("Final answer", "answer"))).strip() == "?"
            ),
        },
    ),
    "hle": _searches(
        "HLE", f"{HUB}/cais/hle (test; access on request)", "judge", left_out={"needs an image": adapters.needs_image}
    ),
    "xbench": _searches(
        "xbench-DeepSearch",
        f"https://github.com/xbench-ai/xbench-evals (data/DeepSearch*.csv) or {HUB}/xbench/DeepSearch",
        "judge",
        question=("prompt", "question"),
        decode=adapters.decode_xbench,
        note="encrypted, with the key in the field canary; take the files as published",
    ),
    "countdown": Benchmark(
        title="Countdown",
        get=f"python -m recipe.tasks.countdown.data, or {HUB}/Jiayi-Pan/Countdown-Tasks-3to4",
        question=("nums", "numbers"),
        answer=("target",),
        scoring="countdown",
        style="plain",
        read_question=adapters.countdown_question,
        read_answers=adapters.countdown_answers,
    ),
    "walk": Benchmark(
        title="the number walk",
        get="python -m recipe.tasks.walk.data --output-dir outputs/data/walk, and evaluate with scripts/eval-walk.sh",
        question=("start",),
        answer=("target",),
        scoring="walk",
        style="plain",
        read_question=adapters.walk_question,
        read_answers=adapters.walk_answers,
    ),
    "wordproblems": Benchmark(
        title="the synthetic word problems",
        get="python -m recipe.tasks.word_problems.data --output-dir outputs/data/word_problems, and evaluate with "
        "scripts/eval-wordproblems.sh",
        scoring="number",
        style="plain",
    ),
    "searchtask": _searches(
        "the synthetic search task",
        "python -m recipe.tasks.search.data --output-dir outputs/data/search_task, and evaluate with "
        "scripts/eval-searchtask.sh",
        "qa",
    ),
    "amc23": _maths("AMC23", f"{HUB}/math-ai/amc23 or {HUB}/AI-MO/aimo-validation-amc"),
    "olympiadbench": _maths(
        "OlympiadBench",
        f"{HUB}/Hothan/OlympiadBench (OE_TO_maths_en_COMP) or {HUB}/math-ai/olympiadbench",
        answer=("final_answer", "answer"),
        note="several final answers are one answer, in any order; context is asked with the question",
    ),
}


def find_benchmark(name: str) -> Benchmark:
    """Return the benchmark with a name, without regard to case, spaces, - and _.

    Raises:
        ValueError: there is no such benchmark; the message lists all benchmarks.
    """
    benchmark = BENCHMARKS.get("".join(char for char in name.lower() if char not in "-_ "))
    if benchmark is None:
        raise ValueError(f"no benchmark {name!r}: choose one of {', '.join(BENCHMARKS)}")
    return benchmark
