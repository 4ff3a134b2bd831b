"""The Python tool: runs programs that a model wrote, confined on this machine or on a Sandbox Fusion server.

Trainer: tool.py. In the interpreter of the programs, which need not be the trainer's (standard library, Python 3.9):
server.py forks a process for each program, confinement.py is what it gives up first, cell.py runs the program.
"""

from typing import NamedTuple


class Result(NamedTuple):
    """The end of a program: all that it printed, its exit code or minus the number of the signal that ended it, and the
    reason if it was stopped: `timeout`, `output`, `disk`, `threads` or `cpu`."""

    output: bytes
    code: int
    reason: str | None = None
