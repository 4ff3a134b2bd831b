"""The Python tool, for the trainer in tool.py. In the interpreter of the programs, which need not be the trainer's
(standard library, Python 3.9), server.py forks a process for each program, confinement.py confines it, cell.py runs it.
"""

from typing import NamedTuple


class Result(NamedTuple):
    """A program's end: output, exit code or minus its signal, and `timeout`, `output`, `disk`, `threads` or `cpu`."""

    output: bytes
    code: int
    reason: str | None = None
