"""A program as a notebook's cell."""

import contextlib
import io
import re

import pytest

from verl.workers.rollout.tools.python.cell import run, unwrapped


@pytest.mark.parametrize(
    "code, expected",
    [
        ("x = 1", "x = 1"),
        ("```\nx = 1\n```", "x = 1"),
        ("\n```python\nx = 1\n\ny = 2\n```\n\n", "x = 1\n\ny = 2"),
        ("```py\nx = 1", "x = 1"),  # not closed
        ("  ```python\n  x = 1\n  ```", "x = 1"),
        ("\tx = 1\n\tif x:\n\t\ty = 2\n", "x = 1\nif x:\n\ty = 2\n"),
        ("\n\n  x = 1\n\n  y = 2\n", "\n\nx = 1\n\ny = 2\n"),
        ("x = '''\n```\n'''", "x = '''\n```\n'''"),
        ("~~~5", "~~~5"),
        ("```", ""),
    ],
)
def test_fences_and_indentation(code, expected):
    assert unwrapped(code) == expected


@pytest.mark.parametrize(
    "code, printed",
    [
        ("1;", "1\n"),
        ("print(1),", "1\n(None,)\n"),
        ("(1 +\n2)  # three", "3\n"),
        ("if True:\n    1", ""),
        ("if True: 1\n2", "2\n"),
        ("def f():\n  return 1\nf()", "1\n"),
        ("from __future__ import annotations\nx: y = 1\nx", "1\n"),
        ("try:\n  1/0\nexcept ZeroDivisionError:\n  2\n3", "3\n"),
        ("'''\n1'''", "'\\n1'\n"),
        ("```python\n    x = 6\n    x * 7\n```", "42\n"),
        ("class A:\n  def f(self): return __name__\nA().f()", "'__main__'\n"),
        ("raise SystemExit", ""),
    ],
)
def test_values_of_last_expressions_are_printed(code, printed):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        run(code)
    assert out.getvalue() == printed


@pytest.mark.parametrize(
    "code, line, error",
    [
        ("def f():\n  1 / 0\nf()\n2", 2, "ZeroDivisionError"),
        ("x = 1\ny = )", 2, "SyntaxError"),
        ("return 1", 1, "SyntaxError"),
        ("a\x00b", None, "(SyntaxError|ValueError)"),
    ],
)
def test_errors_name_the_programs_lines(code, line, error):
    err = io.StringIO()
    with contextlib.redirect_stderr(err):
        run(code)
    assert line is None or f'File "<python>", line {line}' in err.getvalue()
    assert re.match(error, err.getvalue().splitlines()[-1])
