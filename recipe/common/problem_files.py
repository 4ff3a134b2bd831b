"""Helpers for the makers of small tasks: checks of fields, draws of problems, splits, and the command line."""

import argparse
import random
from collections.abc import Callable, Hashable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

Problem = TypeVar("Problem", bound=Hashable)


def require(holds: bool, name: str, value, expected: str) -> None:
    """Raise ValueError unless `holds`; the message says that the field `name` has this value, and what was expected."""
    if not holds:
        raise ValueError(f"{name}={value!r}: expected {expected}")


def split_of(problem: Hashable, held_out: Mapping[str, float]) -> str:
    """Return the split of a problem. It depends on the problem alone, so that no two splits share a problem, not even
    in data of different seeds.

    Args:
        held_out: split -> share of all problems; the other problems belong to `train`.
    """
    place = random.Random(f"0/{problem}").random()
    for split, share in held_out.items():
        if place < share:
            return split
        place -= share
    return "train"


def draw_until(
    draw: Callable[[int], Problem | None],
    belongs: Callable[[Problem], bool],
    size: int,
    name: str,
    attempts: int,
    repeats: bool = False,
) -> list[Problem]:
    """Return `size` problems for which `belongs` holds, distinct unless `repeats`.

    Args:
        draw: function of the number of problems so far that returns a problem, or None if the draw made none.
        name: name of the field that sets `size`, for the error message.
        attempts: number of consecutive draws without a new problem after which the search stops.

    Raises:
        ValueError: there are too few such problems.
    """
    problems: list[Problem] = []
    seen: set[Problem] = set()
    fruitless = 0
    while len(problems) < size:
        if fruitless == attempts:
            raise ValueError(
                f"{name}={size}: there are only about {len(seen)} such problems; widen it or ask for fewer"
            )
        problem = draw(len(problems))
        if problem is None or not belongs(problem) or (not repeats and problem in seen):
            fruitless += 1
        else:
            problems.append(problem)
            seen.add(problem)
            fruitless = 0
    return problems


def rl_row(data_source: str, question: str, truth, split: str, index: int, ability: str = "math", **extra) -> dict:
    """Return a row in verl's parquet format, whose extra_info also has the fields in `extra`."""
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": question}],
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": split, "index": index, **extra},
    }


def conversation(question: str, answer: str) -> dict:
    """Return a demonstration in the SFT trainer's format."""
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def parser_of(doc: str | None, config_class: type, output_required: bool = True) -> argparse.ArgumentParser:
    """Return a parser with --output-dir and an option for each of the config's fields."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", required=output_required, help="where the files go")
    for field in fields(config_class):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    return parser


def write_and_tell(
    write: Callable[[str, Any], dict[str, Path]],
    config_class: type,
    options: dict,
    output_dir: str,
    sizes: Mapping[str, str],
) -> None:
    """Write a task's files by `write(output_dir, config)`, and print the config and the files' paths.

    Args:
        sizes: split -> name of the config field with its number of rows.

    Raises:
        SystemExit: the options are invalid.
    """
    try:
        config = config_class(**options)
        paths = write(output_dir, config)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
    print(", ".join(f"{name}={value}" for name, value in asdict(config).items()))
    for split, path in paths.items():
        print(f"{split}: {getattr(config, sizes[split]):,} rows in {path}")
