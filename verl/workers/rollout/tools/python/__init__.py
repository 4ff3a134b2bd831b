"""The Python tool: runs programs that a model wrote, confined on this machine or on a Sandbox Fusion server.

Trainer: tool.py. In the interpreter of the programs, which need not be the trainer's (standard library, Python 3.9):
server.py forks a process for each program, confinement.py is what it gives up first, cell.py runs the program.
"""

from typing import NamedTuple


class Result(NamedTuple):
    """What a program printed, the exit code or minus the signal's number, and why it was killed, if it was:
    `timeout`, `output`, `disk`, `threads` or `cpu`."""

    output: bytes
    code: int
    reason: str | None = None
