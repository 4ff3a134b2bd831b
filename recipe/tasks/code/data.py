"""Makes verl's parquet files of code from files as they are published on the Hugging Face hub.

    python -m recipe.tasks.code.data --input train.parquet --output outputs/data/code/train.parquet

Reads TACO and APPS (`question`, `input_output`, `starter_code`), CodeContests (`description`, `public_tests`,
`private_tests`, `generated_tests`) and rows in verl's format, such as Eurus-2-RL-Data, of which it takes those of code.
"""

import json

from recipe.common.problem_files import convert_file, converter_options, rl_row
from recipe.tasks.code.reward import INSTRUCTION, read_tests
from verl.evaluation.questions.benchmarks import text_question, truth_row
from verl.utils.data_files import BadRow, check_characters


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
    parser = converter_options(__doc__)
    parser.add_argument("--split", default="train")
    options = parser.parse_args(arguments)
    others: list[int] = []  # numbers of the rows of another ability

    def convert_code(row: dict, number: int, index: int) -> dict | None:
        if row.get("ability") not in (None, "", "code", "coding"):
            others.append(number)
            return None
        return convert(row, options.split, index)

    convert_file(options, convert_code)
    print(f"rows of another ability, left out: {len(others):,}")


if __name__ == "__main__":
    main()
