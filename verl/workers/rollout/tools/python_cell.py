"""Runs a program as a notebook runs a cell. Plain standard library from Python 3.8 on, and nothing of this folder: the
text of this file goes to a Sandbox Fusion server with each program."""

import ast
import linecache
import sys
import traceback
import types

NAME = "<python>"
OUT_OF_MEMORY = 98  # exit code
FRAMES = 8  # of a traceback


def compiled(code):
    """A program without its last expression, and that, which is None where the program ends otherwise.

    Most programs end with a line that is an expression, such as `print(x)`. Where that line and what lies before it
    compile by themselves, no tree of Python objects is made, which would take longer than all else here.
    """
    head, newline, line = code.rstrip().rpartition("\n")
    if line and not line[0].isspace():
        try:
            last = compile("\n" * head.count("\n") + newline + line, NAME, "eval")
            return compile(head, NAME, "exec"), last
        except (SyntaxError, ValueError):  # it ends otherwise, or is in error, as is found below
            pass
    tree = ast.parse(code, NAME)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    return compile(tree, NAME, "exec"), last and compile(ast.Expression(last.value), NAME, "eval")


def run(code):
    """Run a program as a notebook runs a cell; the exit code."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"], sys.argv = module, [""]
    linecache.cache[NAME] = len(code), None, code.splitlines(True), NAME
    out, err, exit_code = sys.stdout, sys.stderr, 0
    try:
        program, last = compiled(code)
        exec(program, vars(module))
        if last:
            sys.displayhook(eval(last, vars(module)))
    except SystemExit as error:
        if error.code is not None and not isinstance(error.code, int):
            err.write(f"{error.code}\n")
    except BaseException as error:  # whatever the program raises is its result
        exit_code = OUT_OF_MEMORY if isinstance(error, MemoryError) else 0
        out.flush()
        err.write(describe(error))
    out.flush()
    err.flush()
    return exit_code


def describe(error):
    """A traceback of the program's own lines; no paths of the machine."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == NAME][-FRAMES:]
    lines = ["Traceback (most recent call last):\n"] if frames else []
    lines += traceback.format_list(frames) + traceback.format_exception_only(type(error), error)
    text = "".join(lines)
    for prefix in {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix} - {"/"}:
        text = text.replace(prefix, NAME)
    return text
