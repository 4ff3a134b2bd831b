"""Scores answers by the verifiers of reasoning-gym, in a process of a `ProcessPool`.

The argument is the path of the Python tool's confinement.py: importing verl would take seconds. A request is a list
[family, config, entry, answer, seconds]; the reply is the score, or the text of an error. An answer that takes more
than `seconds` ends the process.

The process that reads answers is confined as a program of the Python tool: it can write no files, and start no process.
Moreover no verifier runs an answer as a program: where the library calls `eval` to give half a point for a Python list,
`ast.literal_eval` reads it, and formulas for sympy come here only if `families.py` allows their characters and names.
"""

import ast
import importlib
import json
import math
import os
import signal
import sys
import warnings
from functools import cache

MEMORY_MB = 1024
LITERALS = ("binary_matrix", "n_queens", "number_sorting", "spiral_matrix", "string_insertion")
TUPLES = ("arc_agi", "rearc")  # their verifiers compare `output` with tuples, which JSON writes as lists


@cache
def verifier(family: str, config: str):
    """Return the `score_answer` of a family."""
    from reasoning_gym.factory import create_dataset

    dataset = create_dataset(family, seed=0, **json.loads(config))
    if family in LITERALS:
        setattr(sys.modules[type(dataset).__module__], "eval", ast.literal_eval)  # noqa: B010
    return dataset.score_answer


def score(family: str, config: dict, entry: dict, answer: str) -> float:
    """Return an answer's score, 0 to 1; an answer at which the verifier fails has 0."""
    score_answer = verifier(family, json.dumps(config))
    if family in TUPLES:
        entry["metadata"]["output"] = tuple(map(tuple, entry["metadata"]["output"]))
    try:
        value = float(score_answer(answer, entry))
    except Exception:  # the verifiers raise many kinds of errors for hostile answers
        return 0.0
    return min(max(value, 0.0), 1.0) if math.isfinite(value) else 0.0


def serve(connection: int) -> None:
    """Answer every line of a socket until the parent closes it."""
    os.write(connection, b'"ready"\n')
    with os.fdopen(os.dup(connection), encoding="utf-8") as requests:
        for request in requests:
            family, config, entry, answer, seconds = json.loads(request)
            signal.setitimer(signal.ITIMER_REAL, seconds)  # SIGALRM ends this process
            try:
                reply: float | str = score(family, config, entry, answer)
            except Exception as error:  # the row's family or config, not the answer
                reply = f"{family}: {type(error).__name__}: {error}"
            signal.setitimer(signal.ITIMER_REAL, 0)
            os.write(connection, json.dumps(reply).encode() + b"\n")


def main(connection: int, confinement_file: str) -> None:
    import reasoning_gym  # noqa: F401

    sys.path.insert(0, os.path.dirname(confinement_file))
    confinement = importlib.import_module("confinement").Confinement(MEMORY_MB, 0, 0, limits_cpu=False)
    del sys.path[0]
    if not confinement.landlock:
        raise OSError("no Landlock in this kernel")
    if child := os.fork():
        os.waitpid(child, 0)
        return
    confinement.apply(os.devnull)
    serve(connection)
    os._exit(0)


if __name__ == "__main__":
    del sys.path[0]  # a module beside this file would hide a library of the same name
    warnings.simplefilter("ignore")
    main(sys.stdin.fileno(), sys.argv[1])
