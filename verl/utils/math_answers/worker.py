"""Compares mathematical answers in a process of its own, so that an endless comparison can be killed.

`comparison.py` starts this file as a script, with the folder of its sibling modules as argument: importing verl
would take seconds. Standard input is a socket to the parent. Each line from the parent is a JSON list
`[truth, answer, seconds]`; the reply is a byte, 1 or 0.
"""

import json
import math
import os
import resource
import signal
import sys
from types import ModuleType

MEMORY_BYTES = 4 * 2**30


def serve(connection: int) -> None:
    """Answer every line of a socket until the parent closes it."""
    from verl.utils.math_answers.equality import is_equal

    os.write(connection, b"r")
    with os.fdopen(os.dup(connection), encoding="utf-8") as jobs:
        for job in jobs:
            truth, answer, seconds = json.loads(job)
            signal.alarm(math.ceil(seconds) + 1)  # The alarm ends this process even if the parent is gone.
            try:
                verdict = is_equal(truth, answer)
            except Exception:  # What cannot be read or computed is not equal; hostile input raises errors of all kinds.
                verdict = False
            signal.alarm(0)
            os.write(connection, b"1" if verdict else b"0")


if __name__ == "__main__":
    # A module beside this file would hide a library of the same name.
    sys.path[:] = [folder for folder in sys.path if folder != os.path.dirname(os.path.abspath(__file__))]
    for package in ("verl", "verl.utils", "verl.utils.math_answers"):
        sys.modules[package] = ModuleType(package)
        sys.modules[package].__path__ = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    serve(sys.stdin.fileno())
