"""Command lines of verl's trainers that end before Ray starts, many of them: one process makes the imports for all.

    results = trainer_commands([Trainer(arguments, environment), ...], folder)

The imports take ten seconds. Each command line then runs in a fork of that process, as with
`python -m verl.trainer.main_ppo`.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

MODULE = "verl.trainer.main_ppo"
ROOT = Path(__file__).resolve().parents[1]


class Trainer(NamedTuple):
    """A command line: what stands after the module's name, the whole environment, and the module."""

    arguments: Sequence[str]
    environment: dict[str, str]
    module: str = MODULE


def trainer_commands(jobs: Sequence[Trainer], folder: Path, seconds: int) -> list[subprocess.CompletedProcess]:
    """In the repository's root, two at a time; `folder` is for what they print. SIGALRM ends each after `seconds`.

    verl chooses its platform when it is imported: one process for each VERL_PLATFORM.
    """
    platforms = [job.environment.get("VERL_PLATFORM") for job in jobs]
    for platform in sorted(set(platforms), key=str):
        chosen = [(i, job) for i, job in enumerate(jobs) if platforms[i] == platform]
        told = [[str(folder / str(i)), list(job.arguments), job.environment, job.module, seconds] for i, job in chosen]
        environment = {**os.environ, **chosen[0][1].environment}
        if platform is None:
            environment.pop("VERL_PLATFORM", None)
        subprocess.run(
            [sys.executable, __file__], input=json.dumps(told), text=True, check=True, cwd=ROOT, env=environment
        )
    return [
        subprocess.CompletedProcess(
            job.arguments,
            int((folder / f"{i}.rc").read_text()),
            (folder / f"{i}.out").read_text(),
            (folder / f"{i}.err").read_text(),
        )
        for i, job in enumerate(jobs)
    ]


def _run(place: str, arguments: list[str], environment: dict[str, str], module: str, seconds: int) -> None:
    """In the fork."""
    import runpy

    signal.alarm(seconds)
    for stream, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{place}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _main() -> None:
    import importlib

    sys.path[0] = str(ROOT)  # as with `python -m`
    jobs = json.load(sys.stdin)
    for module in {module for *_, module, _ in jobs}:
        importlib.import_module(module)
        del sys.modules[module]  # it is run, not imported
    sys.stdout.flush()  # else every fork prints it once more
    running: dict[int, str] = {}

    def wait_for_one() -> None:
        child, status = os.wait()
        Path(f"{running.pop(child)}.rc").write_text(str(os.waitstatus_to_exitcode(status)))

    for place, *job in jobs:
        if len(running) == 2:
            wait_for_one()
        child = os.fork()
        if child == 0:
            return _run(place, *job)
        running[child] = place
    while running:
        wait_for_one()


if __name__ == "__main__":
    _main()
