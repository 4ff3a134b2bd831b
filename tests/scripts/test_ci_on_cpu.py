"""CI installs a browser for the page of trees, and scripts/test.sh counts the tests that were skipped."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def program(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def browser_script(folder: Path, **programs: str) -> subprocess.CompletedProcess:
    """Run .ci/browser.sh where only these programs are on the PATH, and what it needs to run."""
    for name in ("bash", "id", "mktemp", "tail", "rm"):
        (folder / name).symlink_to(shutil.which(name))
    for name, text in programs.items():
        (folder / name).unlink(missing_ok=True)
        program(folder, name, text)
    command = [str(folder / "bash"), str(ROOT / ".ci/browser.sh")]
    return subprocess.run(command, env={"PATH": str(folder)}, capture_output=True, text=True, timeout=60)


APT = 'echo "$@" >> "${0%/*}/apt.log"'


def test_a_missing_browser_is_installed(tmp_path):
    done = browser_script(tmp_path, **{"apt-get": APT, "id": "echo 0"})
    assert done.returncode == 0 and done.stderr == ""
    assert (tmp_path / "apt.log").read_text() == "update\ninstall --yes --no-install-recommends chromium\n"


def test_a_browser_that_is_there_is_kept(tmp_path):
    done = browser_script(tmp_path, **{"apt-get": APT, "id": "echo 0", "chromium-browser": "exit 1"})
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not (tmp_path / "apt.log").exists()


@pytest.mark.parametrize(
    ("programs", "message"),
    [
        ({"apt-get": APT, "id": "echo 1000"}, "no Chromium, and only root can install it"),
        ({"id": "echo 0"}, "no Chromium, and only root can install it"),
        ({"apt-get": "echo no network; exit 100", "id": "echo 0"}, "no network\napt-get did not install Chromium"),
    ],
)
def test_where_no_browser_can_be_had_ci_says_so_and_goes_on(tmp_path, programs, message):
    done = browser_script(tmp_path, **programs)
    assert done.returncode == 0 and message in done.stderr
    assert not (tmp_path / "apt.log").exists()


def test_ci_asks_for_the_browser_and_runs_all_tests():
    lines = (ROOT / ".ci/run").read_text().splitlines()
    assert lines[-2:] == ["bash .ci/browser.sh", "exec bash scripts/test.sh"]


SKIPPING = """
import pytest

@pytest.mark.skipif(True, reason="no such device")
@pytest.mark.parametrize("number", [1, 2])
def test_a(number):
    pass

def test_b():
    pytest.skip("no network:\\n today")

def test_c():
    pass
"""


@pytest.mark.parametrize("options", [[], ["--numprocesses=2"]])
def test_skipped_tests_are_counted_by_their_reasons(tmp_path, options):
    """Several runs of pytest follow one another, as in scripts/test.sh."""
    (tmp_path / "test_some.py").write_text(SKIPPING)
    shutil.copy(ROOT / "tests/conftest.py", tmp_path)
    environment = {**os.environ, "SKIPPED_TESTS": str(tmp_path / "skipped")}
    pytest_run = [sys.executable, "-m", "pytest", "-c", "/dev/null", str(tmp_path), *options]
    for _ in range(2):
        done = subprocess.run(pytest_run, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
    script = (ROOT / "scripts/test.sh").read_text()
    (function,) = re.findall(r"^tell_skipped\(\) \{\n.*?^\}$", script, re.MULTILINE | re.DOTALL)
    shown = subprocess.run(
        ["bash", "-c", f"{function}\ntell_skipped"], env=environment, capture_output=True, text=True, check=True
    )
    assert shown.stdout == "skipped tests: 4 (no such device), 2 (no network: today)\n"
    (tmp_path / "skipped").write_text("")
    shown = subprocess.run(
        ["bash", "-c", f"{function}\ntell_skipped"], env=environment, capture_output=True, text=True, check=True
    )
    assert shown.stdout == "skipped tests: none\n"
