"""Compares mathematical answers in a process of a `ProcessPool`, so that an endless comparison can be killed.

The argument is the folder of the sibling modules: importing verl would take seconds. A request is a list
`[truth, answer, seconds]`; the reply is true or false.
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

    os.write(connection, b'"ready"\n')
    with os.fdopen(os.dup(connection), encoding="utf-8") as jobs:
        for job in jobs:
            truth, answer, seconds = json.loads(job)
            signal.alarm(math.ceil(seconds) + 1)  # The alarm ends this process even if the parent is gone.
            try:
                verdict = is_equal(truth, answer)
            except Exception:  # What cannot be read or computed is not equal; hostile input raises errors of all kinds.
                verdict = False
            signal.alarm(0)
            os.write(connection, json.dumps(bool(verdict)).encode() + b"\n")


if __name__ == "__main__":
    # A module beside this file would hide a library of the same name.
    sys.path[:] = [folder for folder in sys.path if folder != os.path.dirname(os.path.abspath(__file__))]
    for package in ("verl", "verl.utils", "verl.utils.math_answers"):
        sys.modules[package] = ModuleType(package)
        sys.modules[package].__path__ = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    serve(sys.stdin.fileno())
