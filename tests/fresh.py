"""Fresh interpreters, for what forks cannot show, without collections while they import: a fifth of the time."""

import subprocess
import sys
from collections.abc import Mapping, Sequence


def python_for(code: str) -> list[str]:
    """The command that runs code; arguments may follow."""
    return [sys.executable, "-c", f"import gc; gc.disable()\n{code}"]


def output_of(command: Sequence[str], environment: Mapping[str, str] | None = None, text: str = "", **options) -> str:
    """The standard output of a command, which gets a text as standard input, and must succeed."""
    done = subprocess.run(command, env=environment, input=text, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout
