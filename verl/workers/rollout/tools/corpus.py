r"""Reads a corpus for searching: JSONL (also .jsonl.gz) or Parquet, one document a row.

    {"id": "17", "title": "Otter", "text": "The otter is …"}
    {"id": "18", "contents": "\"Heron\"\nThe heron is …"}          # as in wiki-18: first line the title, in quotes

`id` is text or an integer; `title` may be absent, and other keys are left alone. The documents are kept in an Arrow
table with the columns id, title and text, which is compact and can be mapped from a file.
"""

import gzip
import json
import zlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

SCHEMA = pa.schema([(name, pa.large_string()) for name in ("id", "title", "text")])
ROWS_PER_BATCH = 10_000


class Document(NamedTuple):
    id: str
    title: str
    text: str

    @property
    def contents(self) -> str:
        """Title in quotes and text, as wiki-18 has them."""
        return f'"{self.title}"\n{self.text}'


def read_corpus(path: str | Path) -> pa.Table:
    """The documents of a corpus file, in the file's order: columns id, title and text.

    Raises:
        FileNotFoundError: no such file.
        ValueError: another kind of file, a bad row (the message names the file and the line or row), or no documents.
    """
    path = Path(path).expanduser()
    if path.suffix == ".parquet":
        rows = _parquet_rows(path)
    elif path.name.endswith((".jsonl", ".jsonl.gz")):
        rows = _json_rows(path)
    else:
        raise ValueError(f"{path}: expected a corpus in .jsonl, .jsonl.gz or .parquet")
    documents = (_document(row, where) for where, row in rows)
    batches = []
    while columns := list(zip(*islice(documents, ROWS_PER_BATCH), strict=True)):
        batches.append(pa.record_batch([pa.array(column, pa.large_string()) for column in columns], SCHEMA))
    if not batches:
        raise ValueError(f"{path}: no documents")
    return pa.Table.from_batches(batches)


def document_at(documents: pa.Table, i: int) -> Document:
    return Document(*(column[i].as_py() for column in documents.columns))


def _json_rows(path: Path) -> Iterator[tuple[str, dict]]:
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield f"{path}, line {number}", json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {number}: not JSON: {error.msg}, character {error.pos}") from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path}, line {number}: {error}") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path}, after line {number}: damaged gzip file: {error}") from error


def _parquet_rows(path: Path) -> Iterator[tuple[str, dict]]:
    number = 0
    try:
        file = pq.ParquetFile(path)
        columns = [name for name in ("id", "title", "text", "contents") if name in file.schema_arrow.names]
        for batch in file.iter_batches(ROWS_PER_BATCH, columns=columns):
            for row in batch.to_pylist():
                number += 1
                yield f"{path}, row {number}", {key: value for key, value in row.items() if value is not None}
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path}, after row {number}: not Parquet, or damaged: {error}") from error


def _document(row: dict, where: str) -> Document:
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected an object with id, title and text, got {type(row).__name__}")
    if type(row.get("id")) not in (str, int):
        raise ValueError(f"{where}: id: expected text or an integer, got {row.get('id')!r}")
    if "text" not in row and isinstance(contents := row.get("contents"), str):
        title, _, text = contents.partition("\n")
        row = row | {"title": title.strip().strip('"'), "text": text}
    document = Document(str(row["id"]), row.get("title", ""), row.get("text"))
    for key, value in document._asdict().items():
        if not isinstance(value, str):
            raise ValueError(f"{where}: {key}: expected text, got {type(value).__name__}; keys: {', '.join(row)}")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{where}: {key}: {error.reason}, character {error.start}") from error
    return document
