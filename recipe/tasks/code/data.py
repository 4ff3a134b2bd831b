"""Makes verl's parquet files of code from files as they are published on the Hugging Face hub.

    python -m recipe.tasks.code.data --input train.parquet --output outputs/data/code/train.parquet

Reads TACO and APPS (`question`, `input_output`, `starter_code`), CodeContests (`description`, `public_tests`,
`private_tests`, `generated_tests`) and rows in verl's format, such as Eurus-2-RL-Data, of which it takes those of code.
"""

import argparse
import json
from pathlib import Path

from recipe.common.problem_files import rl_row
from recipe.tasks.code.reward import INSTRUCTION, read_tests
from verl.evaluation.questions.benchmarks import text_question, truth_row
from verl.utils.data_files import BadRow, check_characters, describe_bad, read_rows, write_rows


def convert(row: dict, split: str, index: int) -> dict:
    """Return a published row in verl's format, its ground truth as JSON. Raise BadRow if it has no usable tests."""
    if isinstance(row.get("reward_model"), dict):
        truth, question = truth_row(row["reward_model"].get("ground_truth")), ""
    else:
        truth, question = _published_tests(row), text_question(row, ("question", "description"))
    try:
        read_tests(truth)
    except ValueError as error:
        raise BadRow(str(error)[:200]) from error
    text = json.dumps(truth)
    if not question:
        return row | {"reward_model": {"style": "rule", "ground_truth": text}}
    check_characters("question", question)
    form = "Read from standard input and write to standard output."
    if truth.get("fn_name"):
        form = f"Write the function {truth['fn_name']}."
    if starter := (row.get("starter_code") or "").rstrip():
        form += f" Begin with this code:\n\n```python\n{starter}\n```\n"
    source = row.get("data_source") or "code"
    return rl_row(source, f"{question}\n\n{form}\n{INSTRUCTION}", text, split, index, ability="code")


def _published_tests(row: dict) -> dict:
    if row.get("input_file") or row.get("output_file"):
        raise BadRow("its solutions read or write a file of their own")
    if row.get("input_output"):
        return truth_row(row["input_output"])
    parts = [row.get(name) or {} for name in ("public_tests", "private_tests", "generated_tests")]
    return {key + "s": [text for part in parts for text in part.get(key) or ()] for key in ("input", "output")}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", required=True, type=Path)
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--split", default="train")
    parser.add_argument("--skip-bad-rows", action="store_true")
    args = parser.parse_args(arguments)
    rows: list[dict] = []
    bad: dict[int, str] = {}
    others = 0
    try:
        for number, row in enumerate(read_rows(args.input)):
            row = {key.lower(): value for key, value in row.items()}
            if row.get("ability") not in (None, "", "code", "coding"):
                others += 1
                continue
            try:
                rows.append(convert(row, args.split, len(rows)))
            except BadRow as error:
                bad[number] = str(error)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
    if bad and not args.skip_bad_rows:
        raise SystemExit(f"error: {args.input}: {describe_bad(bad)}; --skip-bad-rows leaves them out")
    if not rows:
        raise SystemExit(f"error: {args.input} has no usable rows: {describe_bad(bad)}")
    write_rows(args.output, rows)
    print(f"{len(rows):,} rows in {args.output}; rows of another ability, left out: {others:,}")
    if bad:
        print(f"left out: {describe_bad(bad)}")


if __name__ == "__main__":
    main()
