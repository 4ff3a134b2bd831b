"""What the overlay adds to `import verl`: fresh interpreters with our plug-in and without any, in turn.

    python benchmarks/import_cost.py [--runs 10]

Baseline: VERL_USE_EXTERNAL_PLUGINS=none, upstream's own switch. Writes benchmarks/results/import_cost.md.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time

from benchmarks.report import write_report


def seconds_to_import(plugins: str) -> float:
    env = {k: v for k, v in os.environ.items() if not k.startswith("VERL_")}
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", "import verl"],
        check=True,
        capture_output=True,
        env={**env, "VERL_USE_EXTERNAL_PLUGINS": plugins},
    )
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    runs = parser.parse_args().runs
    for plugins in ("none", "auto"):  # warm the disk cache
        seconds_to_import(plugins)
    pairs = [(seconds_to_import("none"), seconds_to_import("exploration_recipes")) for _ in range(runs)]
    without, ours = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(b / a for a, b in pairs)
    rows = [
        ("without plug-ins (baseline)", f"{without:.3f}", "1.000"),
        ("with ours", f"{ours:.3f}", f"{ratio:.3f}"),
    ]
    write_report(
        "import_cost",
        f"`import verl` in a fresh interpreter, median of {runs} alternating runs; the ratio is the median of pairs. "
        "Target: at most 1.05.",
        ("import verl", "seconds", "ratio"),
        rows,
    )


if __name__ == "__main__":
    main()
