"""The Python tool. The trainer uses tool.py. The programs' interpreter need not be the trainer's (Python 3.9, standard
library): in it, server.py forks a process for each program, confinement.py confines it, and cell.py runs the program.
With `session: true` a process runs the programs of one session: session.py in the trainer, cells.py in the interpreter.
"""

from typing import NamedTuple


class Result(NamedTuple):
    """A program's output, exit code (or minus its signal; None if its process goes on), and the limit at which it was
    stopped, if any: `timeout`, `output`, `disk`, `threads` or `cpu`."""

    output: bytes
    code: int | None
    reason: str | None = None
