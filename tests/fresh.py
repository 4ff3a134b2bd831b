"""Fresh interpreters, for what forks cannot show, without collections while they import: a fifth of the time."""

import subprocess
import sys
from collections.abc import Mapping, Sequence

QUICKLY = "import gc; gc.disable()\n"
_RUN = f"{QUICKLY}import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"


def python_for(code: str) -> list[str]:
    """The command that runs code; arguments may follow."""
    return [sys.executable, "-c", QUICKLY + code]


def python_of(file) -> list[str]:
    """The command that runs a file; arguments may follow."""
    return [sys.executable, "-c", _RUN, str(file)]


def output_of(command: Sequence[str], environment: Mapping[str, str] | None = None, given: str = "", **options) -> str:
    """The standard output of a command, which gets a text as standard input, and must succeed."""
    done = subprocess.run(command, env=environment, input=given, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout
