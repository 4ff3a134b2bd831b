"""Makes verl's parquet files of mathematics from files as they are published on the Hugging Face hub.

    python -m recipe.tasks.mathematics.data --name math500 --input test.jsonl --output outputs/data/math/math500.parquet

Reads DAPO-Math-17k, MATH, MATH-500, AMC23, AIME24/25, OlympiadBench and files with the same fields, in any case: a
question in `problem`, `question` or `prompt` (text or messages), an answer in `reward_model.ground_truth`,
`final_answer` (a list in OlympiadBench), `answer`, or the last \\boxed{...} of `solution`.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from recipe.common.problem_files import rl_row
from recipe.tasks.mathematics.evaluation import math_answer, math_question
from verl.evaluation.questions.prompts import BOXED_INSTRUCTION
from verl.utils.data_files import BadRow, check_characters, describe_bad, listed, read_rows, write_rows

TRAINING_SETS = ("dapo-math-17k", "math")


@dataclass
class Problems:
    """Rows in verl's format, and the rows that were left out."""

    rows: list[dict] = field(default_factory=list)
    bad: dict[int, str] = field(default_factory=dict)  # row number (0 for the first) -> problem of the row
    repeats: int = 0  # number of rows with the question of an earlier row
    contradictions: list[int] = field(default_factory=list)  # numbers of the repeats that have another answer


def convert(rows: Iterator[dict], name: str, split: str, data_source: str | None, keep_repeats: bool) -> Problems:
    """Convert published rows into verl's format; repeated questions are kept once unless `keep_repeats`. A
    `data_source` of None keeps each row's own, or takes `name` if it has none."""
    problems = Problems()
    answers: dict[str, str] = {}
    for number, row in enumerate(rows):
        try:
            if not isinstance(row, dict):
                raise BadRow(f"expected an object, got {type(row).__name__}")
            row = {key.lower(): value for key, value in row.items()}
            question, answer = math_question(row), math_answer(row)
            source = data_source or row.get("data_source") or name
            for part, text in (("question", question), ("answer", answer), ("data_source", str(source))):
                check_characters(part, text)
        except BadRow as error:
            problems.bad[number] = str(error)
            continue
        if question in answers:
            problems.repeats += 1
            if answers[question] != answer:
                problems.contradictions.append(number)
            if not keep_repeats:
                continue
        answers[question] = answer
        problems.rows.append(rl_row(source, f"{question}\n\n{BOXED_INSTRUCTION}", answer, split, len(problems.rows)))
    return problems


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--name", required=True, help="such as dapo-math-17k, math, math500, amc23, olympiadbench, aime24"
    )
    parser.add_argument("--input", required=True, type=Path)
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--split", help="train for dapo-math-17k and math, else test")
    parser.add_argument("--data-source", help="the rows' own, or else --name")
    parser.add_argument("--keep-repeats", action="store_true", help="DAPO-Math-17k has every question about 100 times")
    parser.add_argument("--skip-bad-rows", action="store_true")
    args = parser.parse_args(arguments)
    split = args.split or ("train" if args.name in TRAINING_SETS else "test")
    try:
        problems = convert(read_rows(args.input), args.name, split, args.data_source, args.keep_repeats)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
    if problems.bad and not args.skip_bad_rows:
        raise SystemExit(f"error: {args.input}: {describe_bad(problems.bad)}; --skip-bad-rows leaves them out")
    if not problems.rows:
        raise SystemExit(f"error: {args.input} has no usable rows: {describe_bad(problems.bad)}")
    write_rows(args.output, problems.rows)
    print(f"{args.name}: {len(problems.rows):,} rows in {args.output}")
    if problems.repeats:
        print(f"repeated questions, {'kept' if args.keep_repeats else 'left out'}: {problems.repeats:,}")
    if problems.contradictions:
        print(f"repeated with another answer: {listed(problems.contradictions)}")
    if problems.bad:
        print(f"left out: {describe_bad(problems.bad)}")


if __name__ == "__main__":
    main()
