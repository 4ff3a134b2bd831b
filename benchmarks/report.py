"""Writes a benchmark's results file: machine, command, table. Needs nothing but Python and torch."""

import os
import platform
import shlex
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from recipe.common.results import replacing

RESULTS = Path(__file__).resolve().parent / "results"


def machine() -> str:
    """CPU, cores and memory in words; a GPU's name where torch sees one."""
    import torch

    model = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ", no GPU"
    return f"{model}, {os.cpu_count()} cores, {memory / 2**30:.0f} GiB{gpu}"


def report_text(name: str, what: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The page: a title, what was measured, the table, the machine and the command."""
    table = ["| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows)]
    command = shlex.join(["python", os.path.relpath(sys.argv[0]), *sys.argv[1:]])
    return "\n".join(
        [f"# {name}", "", what, "", *table, "", f"Machine: {machine()}. Command: `{command}`. {date.today()}."]
    )


def write_report(name: str, what: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> Path:
    """Write benchmarks/results/<name>.md and print it."""
    text = report_text(name, what, header, rows)
    path = RESULTS / f"{name}.md"
    with replacing(path) as unfinished:
        unfinished.write_text(text + "\n")
    print(text)
    return path
