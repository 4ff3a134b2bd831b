"""Tests of the benchmarks' reports: each result page names the command that made it, and where to find its script."""

import re
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from benchmarks.report import RESULTS, report_text

ROOT = Path(__file__).resolve().parents[2]
IN_GIT = (ROOT / ".git").exists()
HAS_HISTORY = IN_GIT and not (ROOT / ".git/shallow").exists()


@pytest.mark.parametrize(
    ("spec", "program"),
    [(None, "benchmarks/grpo_step.py"), (ModuleSpec("benchmarks.grpo_step", None), "-m benchmarks.grpo_step")],
)
def test_a_page_says_how_it_was_made(monkeypatch, spec, program):
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", spec)
    monkeypatch.setattr("sys.argv", [str(ROOT / "benchmarks/grpo_step.py"), "--runs", "2 3"])
    monkeypatch.chdir(ROOT)
    title, _, what, _, header, line, row, _, made = report_text("x", "what", ("a", "b"), [("1", "2")]).split("\n")
    assert (title, what, header, line, row) == ("# x", "what", "| a | b |", "| --- | --- |", "| 1 | 2 |")
    assert f"Command: `python {program} --runs '2 3'`." in made
    assert re.search(r"Commit [0-9a-f]{7,}" if IN_GIT else "Not in a git repository", made)


@pytest.mark.parametrize("page", sorted(RESULTS.glob("*.md")), ids=lambda page: page.stem)
def test_a_results_script_can_be_had(page):
    text = page.read_text()
    ((module, shell),) = re.findall(
        r"Command: `(?:python (?:-m )?(benchmarks[./]\w+)|bash ((?:scripts|recipe)/[\w/.]+\.sh))", text
    )
    script = shell or module.replace(".", "/") + ".py"
    (commit,) = re.findall(r"(?:Recorded in commit|: commit|Commit) ([0-9a-f]{7,})", text)
    if not (ROOT / script).exists():
        assert f"`git show {commit}:{script}`" in text
        if HAS_HISTORY:
            subprocess.run(["git", "cat-file", "-e", f"{commit}:{script}"], cwd=ROOT, check=True)
