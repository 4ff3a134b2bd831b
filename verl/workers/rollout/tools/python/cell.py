"""Runs a program as a notebook runs a cell. The text of this file goes to a Sandbox Fusion server with each program."""

import ast
import linecache
import sys
import textwrap
import traceback
import types

NAME = "<python>"


def unwrapped(code):
    """Return a program without the Markdown fence around it and the indentation that all its lines share."""
    lines = code.strip("\n").rstrip().split("\n")
    if lines[0].lstrip().startswith("```"):
        lines = lines[1:-1] if len(lines) > 1 and lines[-1].strip() == "```" else lines[1:]
        code = "\n".join(lines)
    first = next((line for line in lines if line.strip()), "")
    return textwrap.dedent(code) if first[:1] in (" ", "\t") else code


def run(code, not_allowed="", module=None, name=NAME):
    """Run a program, and print the value of its last expression, or the traceback of its exception.

    A PermissionError is followed by the text `not_allowed`, which tells the model the rules. Programs that share a
    module share their names; each has a file name of its own, such as `<python 2>`.
    """
    code = unwrapped(code)
    module = module or types.ModuleType("__main__")
    sys.modules["__main__"], sys.argv = module, [""]
    linecache.cache[name] = len(code), None, code.splitlines(True), name
    out, err = sys.stdout, sys.stderr
    try:
        tree = ast.parse(code, name)
        last = ast.Expression(tree.body.pop().value) if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec"), vars(module))
        if last:
            sys.displayhook(eval(compile(last, name, "eval"), vars(module)))
    except SystemExit as error:
        if error.code is not None and not isinstance(error.code, int):
            err.write(f"{error.code}\n")
    except BaseException as error:  # whatever the program raises is its result
        out.flush()
        text = describe(error)
        err.write(text if not_allowed in text or not isinstance(error, PermissionError) else text + not_allowed + "\n")
    for stream in (out, err):
        if not stream.closed:
            stream.flush()


def describe(error):
    """Return a traceback of at most 8 of the program's own frames, without paths of the machine."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(NAME[:-1])][-8:]
    lines = ["Traceback (most recent call last):\n"] if frames else []
    text = "".join(lines + traceback.format_list(frames) + traceback.format_exception_only(type(error), error))
    for prefix in {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix} - {"/"}:
        text = text.replace(prefix, NAME)
    return text
