"""Describes the benchmarks, and checks the files of one.

    python -m verl.evaluation                          # describes all benchmarks
    python -m verl.evaluation gaia metadata.parquet    # describes one, reads its files and counts their questions

Nothing is downloaded.
"""

import argparse

from verl.evaluation.questions.benchmarks import find_benchmark
from verl.evaluation.questions.loading import read_questions
from verl.evaluation.scores.scoring import find_scoring
from verl.utils.parts import parts


def describe(name: str) -> list[str]:
    """Return lines that say where to get the benchmark, which fields it has, and how it is asked and scored."""
    benchmark = find_benchmark(name)
    return [
        f"{name}: {benchmark.title}",
        f"  get      {benchmark.get}",
        f"  fields   {benchmark.fields()}",
        f"  asked    {benchmark.style}, scored by {benchmark.scoring}: {find_scoring(benchmark.scoring).about}",
        *(f"  left out {reason}" for reason in benchmark.left_out),
        *([f"  note     {benchmark.note}"] if benchmark.note else []),
    ]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", help="describes this benchmark only")
    parser.add_argument("files", nargs="*", metavar="FILE", help="reads these files and counts their questions")
    args = parser.parse_args(arguments)
    try:
        for name in [args.name] if args.name else parts("evaluation"):
            print("\n".join(describe(name)))
        if args.files:
            read = read_questions(args.name, args.files)
            print(f"{len(read.questions)} questions; left out: {read.left_out or 'none'}")
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
