"""Measures the time that the overlay adds to `import verl`: fresh interpreters with and without plug-in, in turn.

    python -m benchmarks.import_cost [--runs 10]

Baseline: VERL_USE_EXTERNAL_PLUGINS=none, upstream's own switch. Writes benchmarks/results/import_cost.md.
"""

import os
import statistics
import subprocess
import sys
import time
from functools import partial

from benchmarks.report import in_turns, parser_of, write_report


def seconds_to_import(plugins: str, run: int) -> float:
    """Return the seconds of `import verl` in a fresh interpreter with these VERL_USE_EXTERNAL_PLUGINS."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("VERL_")}
    command = [sys.executable, "-W", "ignore", "-c", "import verl"]
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, env={**env, "VERL_USE_EXTERNAL_PLUGINS": plugins})
    return time.perf_counter() - start


def main() -> None:
    runs = parser_of(__doc__, runs=10).parse_args().runs
    sides = {"without plug-ins (baseline)": "none", "with ours": "exploration_recipes"}
    sides = {name: partial(seconds_to_import, plugins) for name, plugins in sides.items()}
    in_turns(sides, 1)  # warm the disk cache
    seconds = in_turns(sides, runs)
    baseline = next(iter(seconds.values()))
    rows = []
    for name, column in seconds.items():
        ratio = statistics.median(b / a for a, b in zip(baseline, column, strict=True))
        rows.append((name, f"{statistics.median(column):.3f}", f"{ratio:.3f}"))
    write_report(
        "import_cost",
        f"`import verl` in a fresh interpreter, median of {runs} alternating runs; the ratio is the median of pairs. "
        "Target: at most 1.05.",
        ("import verl", "seconds", "ratio"),
        rows,
    )


if __name__ == "__main__":
    main()
