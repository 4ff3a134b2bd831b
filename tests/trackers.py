"""Reads what trackers wrote."""

import json
import struct
from pathlib import Path
from typing import Any

BLOCK, HEADER = 32768, 7
WHOLE, LAST = 1, 4


def wandb_history(run: Path) -> list[dict[str, Any]]:
    """Return what wandb logged in each step, from the log of an offline run.

    The log's format is LevelDB's: blocks with parts of records, after a header of 7 bytes; a part begins with a
    checksum, its length and its kind. A value that is a dictionary has a key for each entry, as in `table.path`.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = run.glob("*.wandb")
    data, at, parts, history = file.read_bytes(), HEADER, b"", []
    while at + HEADER <= len(data):
        if (left := BLOCK - at % BLOCK) < HEADER:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        parts, at = parts + data[at + HEADER : at + HEADER + length], at + HEADER + length
        if kind in (WHOLE, LAST):
            record, parts = Record.FromString(parts), b""
            if items := record.history.item:
                history.append({".".join(item.nested_key): json.loads(item.value_json) for item in items})
    return history
