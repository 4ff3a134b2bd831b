"""Compares mathematical answers in a process of its own, so that an endless comparison can be killed.

`math_equivalence` starts this file as a script, not as a module: importing verl would take seconds. Standard input is a
socket to the parent. Each line from the parent is a JSON list `[truth, answer, seconds]`; the reply is a byte, 1 or 0.
"""

import json
import logging
import math
import os
import resource
import signal
import sys
import warnings

MEMORY_BYTES = 4 * 2**30


def is_equivalent(truth: str, answer: str) -> bool:
    """Whether math-verify finds the LaTeX `answer` equal to `truth`; False for what it cannot read."""
    from math_verify import LatexExtractionConfig, parse, verify

    # no time-outs of math-verify, which print warnings and work in the main thread only: the parent kills this process
    latex = (LatexExtractionConfig(),)
    gold, parsed = (parse(f"\\boxed{{{text}}}", latex, parsing_timeout=None) for text in (truth, answer))
    # allow_set_relation_comp: x < 3 and (-oo, 3) are the same, whichever of the two is the truth
    return bool(gold and parsed) and verify(gold, parsed, timeout_seconds=None, allow_set_relation_comp=True)


def serve(connection: int) -> None:
    """Answer every line of a socket until the parent closes it."""
    is_equivalent("1", "1")  # imports everything
    os.write(connection, b"r")
    with os.fdopen(os.dup(connection), encoding="utf-8") as jobs:
        for job in jobs:
            truth, answer, seconds = json.loads(job)
            signal.alarm(math.ceil(seconds) + 1)  # ends this process even if the parent is gone
            try:
                verdict = is_equivalent(truth, answer)
            except Exception:  # sympy raises many kinds of errors for hostile input, RecursionError included: not equal
                verdict = False
            signal.alarm(0)
            os.write(connection, b"1" if verdict else b"0")


if __name__ == "__main__":
    # upstream's math_verify.py, in the folder of this file, would hide the library
    sys.path[:] = [folder for folder in sys.path if folder != os.path.dirname(os.path.abspath(__file__))]
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    serve(sys.stdin.fileno())
