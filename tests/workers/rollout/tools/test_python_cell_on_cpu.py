"""A program as a notebook's cell, against an oracle that always goes by the program's tree."""

import ast
import contextlib
import io
import traceback
import warnings

import pytest

from verl.workers.rollout.tools.python_cell import NAME, compiled

PROGRAMS = [
    *(
        "",
        "\n\n",
        "x = 1",
        "1",
        "1;",
        "1; 2",
        "x = 1\nx + 1",
        "x = 1\n\n\nx + 1\n\n",
        "x = 1\nx + 1  # two",
        "1\n# end",
    ),
    *(
        "print(1)",
        "print(1),",
        "print(1) or 2",
        "x = (1 +\n2)",
        "(1 +\n2)",
        "print(\n3\n)",
        "x = 1 + \\\n2",
        "1 + \\\n2",
    ),
    *(
        "if True:\n    1\n2",
        "if True:\n    1",
        "if True: 1\n2",
        "if True:\n    1\nelse:\n    2",
        "def f():\n  return 1\nf()",
    ),
    *(
        "class A: pass\nA.__name__",
        "@str\nclass A: pass",
        "for i in range(2): i",
        "for i in range(2):\n  i\ni",
        "x = '''\n1'''",
    ),
    *(
        "'''\n1'''",
        "x = '''\n1\n2\n'''",
        "'''\n'''\n1",
        "'a'\n'b'",
        "x = [\n1,\n2]\nx",
        "x = 1 \\\n\n2",
        "1 if 0 else\\\n2",
    ),
    *(
        "(y := 3)",
        "y = 3\ny = 4",
        "y: int = 3\ny",
        "import math\nmath.floor(2.5)",
        "lambda: 1\n1",
        "a = 1\r\na",
        "1\r2",
    ),
    *(
        "\ufeff1",
        "# coding: latin-1\n'é'",
        "\x0c1",
        "x = 1\n\x0cx",
        " 1",
        "x = 1\n x",
        "if True:\n\t1\n 2",
        "async def f(): pass\n1",
    ),
    *(
        "from __future__ import annotations\nx: y = 1\nx",
        "try:\n  1/0\nexcept ZeroDivisionError:\n  2\n3",
        "None",
        "x = 1\nNone",
    ),
    *(
        "1/0",
        "x = 1\n\n1/0",
        "\n\n\nx = 0\n1 / x",
        "def f():\n  1/0\n\nf()",
        "x = (",
        "x = 1\ny = )\n2",
        "x = 1\n2 +",
        "return 1",
    ),
    *(
        "yield 1",
        "await x",
        "x = 1\nreturn\n1",
        "break\n1",
        "print(1)\n1 = 2",
        "a\x00b",
        "a = 1\x00\n2",
        "'\\ud800'",
        "*a",
        "x\n*1",
    ),
    *(
        "print 1",
        "match 1:\n  case 1:\n    2",
        "del x",
        "x = 1\ndel x\nx",
        "pass",
        "assert 0\n1",
        "global z\nz = 1\nz",
        "f'{1}'",
    ),
]


def by_tree(code):
    tree = ast.parse(code, NAME)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    return compile(tree, NAME, "exec"), last and compile(ast.Expression(last.value), NAME, "eval")


def outcome(compiler, code):
    """What is printed, the last expression's value, the names that are bound, and the error with its line."""
    names, out, value, error = {}, io.StringIO(), None, None
    with contextlib.redirect_stdout(out), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            program, last = compiler(code)
            exec(program, names)
            value = last and (eval(last, names),)
        except Exception as exception:
            lines = [frame.lineno for frame in traceback.extract_tb(exception.__traceback__) if frame.filename == NAME]
            error = type(exception), str(exception), lines, getattr(exception, "lineno", None)
    bound = {name: bound for name, bound in names.items() if isinstance(bound, int | str | list)}
    return out.getvalue(), repr(value), bound, error


@pytest.mark.parametrize("code", PROGRAMS)
def test_a_program_does_what_its_tree_says(code):
    expected = outcome(by_tree, code)
    assert outcome(compiled, code) == expected
    assert outcome(compiled, f"t = 0\nprint(t)\n{code}\n") == outcome(by_tree, f"t = 0\nprint(t)\n{code}\n")


def test_where_no_tree_is_made(monkeypatch):
    monkeypatch.delattr(ast, "parse")
    for code in ("print(1)", "x = [1,\n2]\nfor i in x:\n    print(i)\nprint(x)  # all\n\n", "1"):
        program, last = compiled(code)
        assert last is not None
