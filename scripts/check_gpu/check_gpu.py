"""Runs the parts of check_gpu.sh one after the other and prints which passed.

A part that fails does not stop the others, and one that takes longer than it should passes slowly. When a part ends, or
has taken twice the seconds that it should, all of its processes are ended.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from check_gpu_parts import PARTS, ROOT, Part, environment_of

sys.path.append(str(ROOT / "scripts"))
from launch import adopt_orphans, end_descendants  # noqa: E402

FOLDER = ROOT / "outputs/check_gpu"
KILL_AFTER = 10  # seconds after a part's time limit in which its processes can end


class Result(NamedTuple):
    """The outcome of a part."""

    part: Part
    code: int | None  # exit code; None if it was not run
    seconds: float = 0.0
    memory: int | None = None  # the most MiB that were in use on a GPU at one time; None if unknown
    message: str = ""  # the reason why the part failed or was not run

    def __str__(self) -> str:
        if self.code is None or self.code:
            return "not run" if self.code is None else "FAILED"
        return "passed" if self.seconds <= self.part.seconds else "passed, slowly"


def gpu_memory() -> list[int]:
    """Return the MiB in use by all processes on each GPU; nothing if nvidia-smi does not report it."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, timeout=10).stdout.split()
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [int(line) for line in lines if line.isdigit()]


def last_error(log: str) -> str:
    """Return the last line like `error: …` or `ValueError: …` of a log's text; if there is none, its last line."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip() for line in log.splitlines()]
    lines = [line for line in lines if line]
    errors = [line for line in lines if re.search(r"(^|\s)error:|\b\w*(Error|Exception|Died)\b.*:", line)]
    return (errors or lines or ["it printed nothing"])[-1]


def run_part(part: Part, folder: Path, dry_run: bool) -> Result:
    """Run a part until it ends or its time limit is over; its output goes to `folder`/NAME.log. With `dry_run` its
    `dry_command` runs, if it has one, else its command."""
    shutil.rmtree(folder / part.name, ignore_errors=True)
    log, started, memory = folder / f"{part.name}.log", time.monotonic(), None
    command = ["bash", "-c", part.dry_command if dry_run and part.dry_command else part.command]
    limit = ["timeout", f"--kill-after={KILL_AFTER}", str(2 * part.seconds)]
    with log.open("wb") as out:
        output = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out}
        process = subprocess.Popen([*limit, *command], cwd=ROOT, env=environment_of(part, folder), **output)
        try:
            while process.poll() is None:
                memory = max([memory or 0, *gpu_memory()]) or None
                time.sleep(0.5)
        finally:
            end_descendants()
    seconds, code = time.monotonic() - started, process.returncode
    if code == 0:
        return Result(part, code, seconds, memory)
    message = last_error(log.read_text(errors="replace"))
    if code in (124, 128 + signal.SIGKILL, -signal.SIGKILL):
        message = f"not done in {2 * part.seconds} s; {message}"
    return Result(part, code, seconds, memory, message)


def check(parts: Iterable[Part], folder: Path, dry_run: bool) -> list[Result]:
    """Run the parts in order; print and return their results. If the part `environment` fails, no later one runs, and
    without `dry_run` none for more GPUs than there are."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    results, failed, gpus = [], False, len(visible.split(",") if visible else gpu_memory())
    for part in parts:
        if failed or (part.gpus > max(gpus, 1) and not dry_run):
            message = "the part environment failed" if failed else f"it needs {part.gpus} GPUs"
            results.append(Result(part, None, message=message))
            continue
        print(f"{part.name} ({part.seconds} s, at most {2 * part.seconds}) ...", flush=True)
        results.append(result := run_part(part, folder, dry_run))
        print(f"    {result} after {result.seconds:.0f} s {result.message}", flush=True)
        if part.name == "environment":
            print((folder / "environment.log").read_text(), flush=True)
            failed = bool(result.code)
    return results


def table_of(results: Sequence[Result], folder: Path) -> str:
    """Return the results as a Markdown table, which names the logs in `folder`."""
    rows = [("part", "", "seconds", "peak GPU MiB", "last error", "log"), ("---",) * 6]
    for result in results:
        used = "unknown" if result.memory is None else f"{result.memory:,}"
        message, log = result.message[:160].replace("|", "/"), folder / f"{result.part.name}.log"
        rows.append((result.part.name, str(result), f"{result.seconds:.0f}", used, message, os.path.relpath(log, ROOT)))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main(names: list[str]) -> int:
    """Run the parts with these names, by default all. Return 0, 1 if a part failed, or 2 if a name is unknown."""
    part_names = [part.name for part in PARTS]
    if unknown := set(names).difference(part_names):
        print(f"error: no part {', '.join(unknown)}; choose of {' '.join(part_names)}", file=sys.stderr)
        return 2
    folder = Path(os.environ.get("CHECK_DIR", FOLDER)).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    adopt_orphans()
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, lambda number, frame: sys.exit(128 + number))
    dry_run = os.environ.get("DRY_RUN", "0") not in ("", "0")
    results = check([part for part in PARTS if not names or part.name in names], folder, dry_run)
    table = table_of(results, folder)
    (folder / "table.md").write_text(table + "\n")
    print(f"\n{table}\n\nEverything of it: {os.path.relpath(folder, ROOT)}")
    return int(any(result.code for result in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
