"""A program as a notebook's cell."""

import contextlib
import io
import re

import pytest

from tests.tables import table
from verl.workers.rollout.tools.python.cell import run, unwrapped


@pytest.mark.parametrize("code, expected", table(__file__, "fences"))
def test_fences_and_indentation(code, expected):
    assert unwrapped(code) == expected


@pytest.mark.parametrize("code, printed", table(__file__, "printed"))
def test_values_of_last_expressions_are_printed(code, printed):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        run(code)
    assert out.getvalue() == printed


@pytest.mark.parametrize("code, line, error", table(__file__, "errors"))
def test_errors_name_the_programs_lines(code, line, error):
    err = io.StringIO()
    with contextlib.redirect_stderr(err):
        run(code)
    assert line is None or f'File "<python>", line {line}' in err.getvalue()
    assert re.match(error, err.getvalue().splitlines()[-1])
