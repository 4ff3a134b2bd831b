"""Makes verl's parquet files of mathematics from files as they are published on the Hugging Face hub.

    python -m recipe.tasks.mathematics.data --name math500 --input test.jsonl --output outputs/data/math/math500.parquet

Reads DAPO-Math-17k, MATH, MATH-500, AMC23, AIME24/25, OlympiadBench and files with the same fields, in any case: a
question in `problem`, `question` or `prompt` (text or messages), an answer in `reward_model.ground_truth`,
`final_answer` (a list in OlympiadBench), `answer`, or the last \\boxed{...} of `solution`.
"""

from recipe.common.problem_files import convert_file, converter_options, rl_row
from recipe.tasks.mathematics.evaluation import math_answer, math_question
from verl.evaluation.questions.prompts import BOXED_INSTRUCTION
from verl.utils.data_files import check_characters

TRAINING_SETS = ("dapo-math-17k", "math")


def main(arguments: list[str] | None = None) -> None:
    parser = converter_options(__doc__)
    parser.add_argument(
        "--name", required=True, help="such as dapo-math-17k, math, math500, amc23, olympiadbench, aime24"
    )
    parser.add_argument("--split", help="train for dapo-math-17k and math, else test")
    parser.add_argument("--data-source", help="the rows' own, or else --name")
    options = parser.parse_args(arguments)
    split = options.split or ("train" if options.name in TRAINING_SETS else "test")
    questions: set[str] = set()
    repeats = 0

    def convert(row: dict, number: int, index: int) -> dict | None:
        nonlocal repeats
        question, answer = math_question(row), math_answer(row)
        source = options.data_source or row.get("data_source") or options.name
        for part, text in (("question", question), ("answer", answer), ("data_source", str(source))):
            check_characters(part, text)
        if question in questions:
            repeats += 1  # DAPO-Math-17k has every question about 100 times
            return None
        questions.add(question)
        return rl_row(source, f"{question}\n\n{BOXED_INSTRUCTION}", answer, split, index)

    convert_file(options, convert)
    if repeats:
        print(f"repeated questions, left out: {repeats:,}")


if __name__ == "__main__":
    main()
