"""Helpers for makers of data: checks of fields, draws of problems, splits, published files, and the command line."""

import argparse
import random
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

from recipe.common.tiny_model import TinyModelConfig, write_tiny_model
from verl.utils.data_files import BadRow, describe_bad, read_rows, write_rows

Problem = TypeVar("Problem", bound=Hashable)


def require(holds: bool, name: str, value, expected: str) -> None:
    """Raise ValueError unless `holds`; the message says that the field `name` has this value, and what was expected."""
    if not holds:
        raise ValueError(f"{name}={value!r}: expected {expected}")


def check_common_fields(config, sizes: Iterable[str], least: int = 0) -> None:
    """Check a maker's sizes, which are at least `least`, and of the other fields that several makers share those that
    it has: the share `demo_correct`, `operators`, and `style`."""
    for name in sizes:
        require(getattr(config, name) >= least, name, getattr(config, name), f"at least {least}")
    correct, operators = getattr(config, "demo_correct", 0), getattr(config, "operators", "+")
    require(0 <= correct <= 1, "demo_correct", correct, "between 0 and 1")
    require(bool(operators) and set(operators) <= set("+-*/"), "operators", operators, "some of + - * /")
    style = getattr(config, "style", "short")
    require(style in ("short", "long"), "style", style, "short or long")


def split_of(problem: Hashable, held_out: Mapping[str, float]) -> str:
    """Return the split of a problem, which depends on the problem alone, so that no two splits share one, not even in
    data of different seeds. `held_out` holds the splits' shares of all problems; the others belong to `train`."""
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
    attempts: int = 50_000,
    repeats: bool = False,
) -> list[Problem]:
    """Return `size` problems for which `belongs` holds, distinct unless `repeats`.

    `draw` gets the number of problems so far and returns a problem or None; the search stops after `attempts`
    consecutive draws without a new problem. `name` is the field that sets `size`, for the error message.
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


def write_splits(
    output_dir: str | Path, config, sizes: Mapping[str, str], rows_of: Callable[[str, int], list[dict]]
) -> dict[str, Path]:
    """Write `<split>.parquet` for each split whose size in the config is above 0, in the order of `sizes`; return the
    paths by split. No file is ever incomplete: if the last one exists, all do."""
    paths = {}
    for split, name in sizes.items():
        if size := getattr(config, name):
            paths[split] = Path(output_dir) / f"{split}.parquet"
            write_rows(paths[split], rows_of(split, size))
    return paths


def run_maker(
    doc: str | None,
    config_class: type,
    write: Callable[[str, Any], Mapping[str, Path]],
    sizes: Mapping[str, str],
    models: Mapping[str, TinyModelConfig] | None = None,
    arguments: list[str] | None = None,
) -> None:
    """Make a task's files as the command line says; print the config and the files' paths.

    Args:
        config_class: dataclass with the task's settings, each of which is an option.
        write: function (output_dir, config) -> split -> path of its file.
        sizes: split -> name of the config field with its number of rows.
        models: option, such as `model-dir` -> the tiny model that it makes.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = models or {}
    parser.add_argument("--output-dir", required=not models, help="where the files go")
    for option in models:
        parser.add_argument(f"--{option}", help="where a tiny model for the task goes")
    for field in fields(config_class):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    options = vars(parser.parse_args(arguments))
    output_dir = options.pop("output_dir")
    folders = {option: options.pop(option.replace("-", "_")) for option in models}
    if not output_dir and not any(folders.values()):
        parser.error(f"--output-dir or --{' or --'.join(models)} says what to make")
    for option, folder in folders.items():
        if folder:
            print(f"tiny model: {write_tiny_model(folder, models[option])}")
    if not output_dir:
        return
    try:
        config = config_class(**options)
        paths = write(output_dir, config)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
    print(", ".join(f"{name}={value}" for name, value in asdict(config).items()))
    for split, path in paths.items():
        print(f"{split}: {getattr(config, sizes[split]):,} rows in {path}")


def converter_options(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that `convert_file` reads."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", required=True, type=Path)
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--skip-bad-rows", action="store_true")
    return parser


def convert_file(options: argparse.Namespace, convert: Callable[[dict, int, int], dict | None]) -> None:
    """Write a published file in verl's format. `convert` gets a row with lower-case keys, its number, and the number of
    rows so far; it returns the new row, None to leave it out, or raises BadRow."""
    rows: list[dict] = []
    bad: dict[int, str] = {}
    try:
        for number, row in enumerate(read_rows(options.input)):
            try:
                if not isinstance(row, dict):
                    raise BadRow(f"expected an object, got {type(row).__name__}")
                converted = convert({key.lower(): value for key, value in row.items()}, number, len(rows))
                rows += [] if converted is None else [converted]
            except BadRow as error:
                bad[number] = str(error)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
    if bad and not options.skip_bad_rows:
        raise SystemExit(f"error: {options.input}: {describe_bad(bad)}; --skip-bad-rows leaves them out")
    if not rows:
        raise SystemExit(f"error: {options.input} has no usable rows: {describe_bad(bad)}")
    write_rows(options.output, rows)
    print(f"{len(rows):,} rows in {options.output}")
    if bad:
        print(f"left out: {describe_bad(bad)}")
