"""Runs solutions, and tests with `assert`, in the sandbox, to which the text of this file goes with each program.

A solution's process gets inputs and gives outputs. It may change all that is here, and changes its own output only:
expected outputs and tests are in other processes.
"""

import ast
import atexit
import builtins
import json
import os
import queue
import sys
import threading
import types

# Solutions may use these modules, and their names, without an import, as in verl's `prime_code`.
MODULES = "string re datetime collections heapq bisect copy math random statistics itertools functools operator io sys"
MODULES += " json builtins typing"


def load_solution(code, name):
    """Return a new module of this name in which the solution has run."""
    sys.modules[name] = module = types.ModuleType(name)
    for statement in ("from {} import *", "import {}"):
        exec("\n".join(map(statement.format, MODULES.split())), vars(module))
    sys.setrecursionlimit(600_000)
    exec(compile(code, "<solution>", "exec", dont_inherit=True), vars(module))
    return module


def run_program(code, text):
    """Run a solution that reads the text from standard input. After an exception the exit code is 1."""
    with open(".stdin", "w", encoding="utf-8", errors="replace", newline="") as file:
        file.write(text)
    os.dup2(os.open(".stdin", os.O_RDONLY), 0)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    sys.stdin = open(0, encoding="utf-8", closefd=False)
    sys.stdout = stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)
    try:
        load_solution(code, "__main__")
    except SystemExit:
        pass
    except BaseException:
        os._exit(1)
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()  # The sandbox itself does not run them.
    for stream in (sys.stdout, stdout):
        stream.flush()
    os._exit(0)


def run_function(code, name, args):
    """Print what the solution's function returns, as JSON, and nothing that the solution prints; `args` is JSON too."""
    output, null = open(os.dup(1), "w"), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    try:
        solution = load_solution(code, "solution")
        owner = solution.Solution() if hasattr(solution, "Solution") else solution
        output.write(json.dumps(getattr(owner, name)(*map(with_whole_keys, json.loads(args)))))
        output.flush()
    except BaseException:
        os._exit(1)
    os._exit(0)


def with_whole_keys(value):
    """Return a dict with whole numbers as keys, of which JSON had made texts; other values are unchanged."""
    try:
        return {int(key): item for key, item in value.items()} if isinstance(value, dict) else value
    except ValueError:
        return value


def answer_call(solution, name, args, kwargs):
    """Call the solution's function; the last line printed is the literal of (whether it returned, value or error)."""
    try:
        reply = True, plain(getattr(solution, name)(*args, **kwargs))
    except Exception as error:
        reply = False, f"{type(error).__name__}: {error}"
    print(f"\n{reply!r}")


def plain(value):
    """Return the value in Python's own types, so that its repr is a literal. Raise TypeError if there are none."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    for kind, own in ((list, list), (tuple, tuple), (set, set), (frozenset, set)):
        if isinstance(value, kind):
            return own(map(plain, value))
    scalars: tuple = (int, float, complex, str, bytes)
    for scalar in scalars:
        if isinstance(value, scalar):
            return scalar(value)
    raise TypeError(f"{type(value).__name__} has no literal")


# Tests run in a thread, which waits for the reply to each call of the solution.
calls: queue.Queue = queue.Queue()
replies: queue.Queue = queue.Queue()


def run_tests(setup, tests, entry_point):
    """Start tests, in which stand-ins take the place of `entry_point`, or of all functions that are unknown if it is
    None; go on as `go_on`."""
    names: dict = {}
    exec(setup, names)
    called = [node.func for node in ast.walk(ast.parse(tests)) if isinstance(node, ast.Call)]
    unknown = {func.id for func in called if isinstance(func, ast.Name)} - set(names) - set(dir(builtins))
    names.update({name: stand_in(name) for name in ([entry_point] if entry_point else unknown)})

    def run():
        try:
            exec(tests, names)
            calls.put("passed")
        except BaseException:
            calls.put("failed")

    threading.Thread(target=run, daemon=True).start()
    print("\n" + calls.get())


def go_on(reply):
    """Give the tests the reply to their call; the last line printed is their next call, `passed` or `failed`."""
    replies.put(reply)
    print("\n" + calls.get())


def stand_in(name):
    """Return a function that has the solution's function of this name called in the solution's process."""

    def call(*args, **kwargs):
        calls.put(f"call {(name, args, kwargs)!r}")
        has_returned, value = ast.literal_eval(replies.get())
        if not has_returned:
            raise RuntimeError(value)
        return value

    return call
