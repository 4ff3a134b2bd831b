"""Writes the prompts of a diagnosis whose plain samples are mixed, right and wrong, as training data (`write=FILE`)."""

import os
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from verl.utils.atomic_files import replacing


def check_target(target: str | None, source: str) -> None:
    """Check that the rows of `source` can be written to `target`, if one is given.

    Raises:
        ValueError: it is `source` itself, no parquet file, or its folder cannot be written.
    """
    if target is None:
        return
    path = Path(str(target))
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if path.suffix != ".parquet" or path.is_dir():
        raise ValueError(f"write={target}: expected the path of a .parquet file")
    if path.resolve() == Path(source).resolve():
        raise ValueError(f"write={target} is the data itself: expected another file")
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"write={target}: {folder} is no folder that can be written")


def write_mixed(source: str, target: str, solve_rates: Mapping[int, float]) -> str:
    """Write the rows whose solve rate lies between 0 and 1, each with `extra_info.solve_rate`, and return a message.

    Args:
        solve_rates: number of each row that was tried -> share of its samples that were right.
    """
    table = pq.read_table(source)
    mixed = [row for row, rate in solve_rates.items() if 0 < rate < 1]
    tried = f"{len(mixed)} of the {len(solve_rates)} rows tried are mixed; {source} has {table.num_rows} (prompts=…)"
    if not mixed:
        return f"{tried}: {target} was not written"
    rates = pa.array([solve_rates[row] for row in mixed])
    rows, names = table.take(mixed).combine_chunks(), table.schema.names
    fields, values = [], []
    if "extra_info" in names and pa.types.is_struct(rows.schema.field("extra_info").type):
        infos = rows["extra_info"].combine_chunks()
        kept = [field for field in infos.type if field.name != "solve_rate"]
        fields, values = kept, [infos.field(field.name) for field in kept]
    infos = pa.StructArray.from_arrays([*values, rates], fields=[*fields, pa.field("solve_rate", rates.type)])
    place = names.index("extra_info") if "extra_info" in names else len(names)
    rows = rows.drop_columns([name for name in names if name == "extra_info"]).add_column(place, "extra_info", infos)
    with replacing(target) as unfinished:
        # Without the metadata, in which `datasets` keeps the columns' types: `extra_info` has another one now.
        pq.write_table(rows.replace_schema_metadata(None), unfinished)
    return f"{tried}; written: {target}"
