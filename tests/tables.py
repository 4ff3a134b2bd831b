"""Tables of cases as text files beside the tests: under a heading `[name]` a row a line, its cells as Python literals.

A line that begins with # is a remark, and so is what follows a # behind the cells.
"""

import ast
import re
from functools import cache
from pathlib import Path


@cache
def _tables(path: Path) -> dict[str, list[tuple]]:
    tables: dict[str, list[tuple]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if re.fullmatch(r"\[[\w' ]+\]", line):
            tables[line.strip("[]")] = rows = []
        elif line and not line.startswith("#"):
            rows.append(ast.literal_eval(f"({line}\n)"))
    return tables


def table(test_file: str, name: str) -> list[tuple]:
    """Return the rows of the table `name` in cases.txt beside the test."""
    return _tables(Path(test_file).with_name("cases.txt"))[name]
