"""Reads published data files row by row, describes bad rows, and writes files of rows.

The makers of training data, the checks of a run's data and `verl.evaluation` use this module.
"""

import csv
import gzip
import io
import json
import sys
import zlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from verl.utils.atomic_files import replacing

LISTED = 20


class BadRow(ValueError):
    """A row that cannot be used; the message says what is wrong with it."""


def read_rows(path: Path, columns: Collection[str] | None = None) -> Iterator[dict]:
    """Yield the rows of a .jsonl, .jsonl.gz, .json (a list of objects), .parquet (with these `columns` only) or .csv
    (with a header) file. A ValueError names a missing, damaged or other file, and the line if known."""
    if not path.is_file():
        raise ValueError(f"{path} does not exist or is no file")
    if path.suffix == ".parquet":
        yield from _parquet_rows(path, columns)
    elif path.name.endswith((".jsonl", ".jsonl.gz")):
        yield from _json_lines(path)
    elif path.suffix == ".json":
        yield from _parse_json(_text(path), list, "a list of objects", str(path))
    elif path.suffix == ".csv":
        yield from _csv_rows(path)
    else:
        raise ValueError(f"{path}: expected a .jsonl, .json, .parquet or .csv file")


def write_rows(path: Path, rows: list[dict]) -> None:
    """Write a .parquet file, or for other suffixes one JSON object on each line; an incomplete file never appears."""
    with replacing(path) as unfinished:
        if path.suffix == ".parquet":
            names = dict.fromkeys(name for row in rows for name in row)  # otherwise those of the first row
            pq.write_table(pa.table({name: [row.get(name) for row in rows] for name in names}), unfinished)
        else:
            unfinished.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_mixed(source: Path, target: Path, solve_rates: Mapping[int, float]) -> str:
    """Write the rows of a .parquet file whose solve rate (row number -> rate) is neither 0 nor 1, each with
    `extra_info.solve_rate`, to another; return a message with their number. Without such rows no file is written."""
    table = pq.read_table(source)
    mixed = {row: rate for row, rate in solve_rates.items() if 0 < rate < 1}
    counts = f"{len(mixed)} of {len(solve_rates)} prompts tried are mixed ({source} has {table.num_rows} rows)"
    if not mixed:
        return f"{counts}: {target} was not written"
    # A new schema has no metadata, in which `datasets` keeps the columns' types.
    fields = {field.name: field for field in table.schema}
    infos = {field.name: field for field in fields["extra_info"].type} if "extra_info" in fields else {}
    infos["solve_rate"] = pa.field("solve_rate", pa.float64())
    fields["extra_info"] = pa.field("extra_info", pa.struct(infos.values()))
    rows = table.take(list(mixed)).to_pylist()
    for row, rate in zip(rows, mixed.values(), strict=True):
        row["extra_info"] = (row.get("extra_info") or {}) | {"solve_rate": rate}
    with replacing(target) as unfinished:
        pq.write_table(pa.Table.from_pylist(rows, pa.schema(fields.values())), unfinished)
    return f"{counts}; written: {target}"


def extra_info_of(row: Mapping) -> dict:
    """Return the `extra_info` that a reward function gets for a row in verl's format.

    Upstream does not pass the column `ability` on, so it is added here. A value in the row's own `extra_info` wins.

    >>> extra_info_of({"ability": "qa", "extra_info": {"index": 3}})
    {'ability': 'qa', 'index': 3}
    """
    ability = {"ability": row["ability"]} if row.get("ability") else {}
    return ability | (row.get("extra_info") or {})


def _json_lines(path: Path) -> Iterator[dict]:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _parse_json(_decoded(line, path), dict, "an object", f"{path}, line {number}")
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: damaged gzip file: {error}") from error


def _parquet_rows(path: Path, columns: Collection[str] | None) -> Iterator[dict]:
    try:
        file = pq.ParquetFile(path)
        present = [name for name in file.schema_arrow.names if columns is None or name in columns]
        for batch in file.iter_batches(batch_size=4096, columns=present):
            yield from batch.to_pylist()
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"{path} is not a readable parquet file ({error})") from error


def _csv_rows(path: Path) -> Iterator[dict]:
    csv.field_size_limit(sys.maxsize)  # Some texts are longer than the default, 131,072 characters.
    reader = csv.DictReader(io.StringIO(_text(path), newline=""), strict=True)
    try:
        for row in reader:
            if None in row or None in row.values():
                raise csv.Error(f"expected {len(reader.fieldnames or ())} fields")
            yield row
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.line_num}: not CSV: {error}") from error


def _text(path: Path) -> str:
    return _decoded(path.read_bytes(), path)


def _decoded(content: bytes, path: Path) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error


def _parse_json(text: str, kind: type, expected: str, where: str):
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON: {error}") from error
    if not isinstance(content, kind):
        raise ValueError(f"{where}: expected {expected}, got {type(content).__name__}")
    return content


def check_characters(name: str, text: str) -> None:
    """Raise BadRow if a text cannot be written as UTF-8: escapes in JSON may leave half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRow(f"{name} has half a character, {text[error.start]!r}") from None


def describe_bad(bad: dict[int, str]) -> str:
    """Return a text with each problem, the number of its rows, and the row numbers of the first 20; `bad`: row number,
    from 0 -> problem."""
    kinds: dict[str, list[int]] = {}
    for number, problem in bad.items():
        kinds.setdefault(problem, []).append(number)
    lines = []
    for problem, numbers in kinds.items():
        more = f", and {len(numbers) - LISTED} more" if len(numbers) > LISTED else ""
        lines.append(f"{problem}: {len(numbers)} row(s) {', '.join(map(str, numbers[:LISTED]))}{more}")
    return "; ".join(lines) or "it is empty"
