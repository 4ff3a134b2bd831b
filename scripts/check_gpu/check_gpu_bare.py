"""Runs the parts of check_gpu_bare.sh, each a benchmark that prints tables, and writes the tables to a JSON file.

    {"torch": "2.11.0", "gpu": "…", "parts": [{"name": "sampler", "code": 0, "seconds": 9.1, "tables": [[[…], …]]}, …]}

A table is a list of rows of cells, the header first. The exit code is 1 if a part failed, and 3 if torch sees no GPU.
"""

import importlib.metadata
import json
import os
import subprocess
import sys
import time
from pathlib import Path

NO_GPU = 3
# name, time limit in seconds, command on a GPU, and arguments that are added where there is none
PARTS = (
    ("kernels", 150, "benchmarks.gpu_kernels", "--device cpu --small --repeats 1"),
    ("gradients", 40, "benchmarks.shared_gradients --device cuda", "--device cpu"),
    ("sampler", 60, "benchmarks.tempering", "--device cpu --rows 2 --vocabulary 5000 --runs 1"),
    (
        "prefix_tree",
        200,
        "benchmarks.prefix_tree --device cuda --runs 5 --only 0.5 --sharing 1 1.5 2.5 4 8",
        "--device cpu --runs 1 --only 6 --sharing 4",
    ),
    ("fsdp2", 30, "benchmarks.fsdp2_step", ""),
)


def tables_of(text: str) -> list[list[list[str]]]:
    """Return the Markdown tables in a text as lists of rows of cells."""
    tables: list[list[list[str]]] = []
    inside = False
    for line in text.splitlines():
        row = line.startswith("|")
        if row and not inside:
            tables.append([])
        if row and not line.startswith("| ---"):
            tables[-1].append([cell.strip() for cell in line.strip("|").split("|")])
        inside = row
    return tables


def has_verl() -> bool:
    """Return whether upstream's verl is installed, without which the part `fsdp2` is left out."""
    try:
        importlib.metadata.version("verl")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def run_part(name: str, seconds: int, command: str, environment: dict[str, str] | None = None) -> dict:
    """Run a part for at most `seconds` with these environment variables, show its output, and return its record."""
    started = time.monotonic()
    print(f"== {name} (at most {seconds} s)", flush=True)
    try:
        done = subprocess.run(
            [sys.executable, "-m", *command.split()],
            stdout=subprocess.PIPE,
            text=True,
            timeout=seconds,
            env=os.environ | (environment or {}),
        )
        code, text = done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        code, text = 124, (error.stdout or b"").decode(errors="replace")
    print(text, flush=True)
    return {"name": name, "code": code, "seconds": round(time.monotonic() - started, 1), "tables": tables_of(text)}


def main(file: Path) -> int:
    import torch

    import verl_patches.plugin  # noqa: F401 (verl may be installed without this project, whose modules it then lacks)
    from verl.utils.atomic_files import replacing

    small = os.environ.get("SMALL", "0") not in ("", "0")
    if not small and not torch.cuda.is_available():
        print("error: torch sees no GPU; SMALL=1 runs small parts without one", file=sys.stderr)
        return NO_GPU
    environment = {"VERL_USE_EXTERNAL_MODULES": "verl_patches.plugin"}
    environment |= {"TRITON_INTERPRET": "1", "VERL_PLATFORM": "cpu"} if small else {}
    chosen = [part for part in PARTS if part[0] != "fsdp2" or has_verl()]
    parts = [
        run_part(name, limit, f"{command} {added if small else ''}", environment)
        for name, limit, command, added in chosen
    ]
    gpu = None if small else torch.cuda.get_device_name()
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as unfinished:
        unfinished.write_text(json.dumps({"torch": torch.__version__, "gpu": gpu, "parts": parts}, indent=1) + "\n")
    print("| part | | seconds |\n| --- | --- | --- |")
    for part in parts:
        print(f"| {part['name']} | {'FAILED' if part['code'] else 'passed'} | {part['seconds']:.0f} |")
    print(f"\nfigures: {file}")
    return int(any(part["code"] for part in parts))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
