"""Hostile programs in each setting that the Python tool has to work in, and where it refuses to start."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.workers.rollout.tools.python.settings import SETTINGS, command_in

ATTACK = Path(__file__).parent / "attack.py"
SYSTEM_PYTHON = "/usr/bin/python3"  # that every user can read
# without Landlock a program sees what all users see, and can leave files where all users can
KNOWN = {"memory of the trainer", "home directories", "writing outside", "devices"}
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="takes root to give up root's rights")
KINDS = {
    **dict.fromkeys(("endless loop", "endless loop in C", "sleep, signals ignored", "stops itself"), "timeout"),
    **dict.fromkeys(("null pointer", "abort"), "crash"),
    **dict.fromkeys(("flood", "one long line"), "output"),
    **dict.fromkeys(("many files", "many empty files", "removed files", "removed files that are mapped"), "disk"),
    **dict.fromkeys(("threads with small stacks", "removed files after the main thread's end"), "threads"),
    **dict.fromkeys(("a name that is no text", "a mapped file whose name is no text"), None),
    **dict.fromkeys(("memory", "_exit", "exit codes of ours", "atexit", "threads that go on", "fork bomb"), None),
}


def attack(setting, folder, *interpreter):
    """What attack.py tells. Its folder is closed to other users, as a user's own is."""
    command = [sys.executable, str(ATTACK), str(folder), *interpreter]
    for part in reversed(setting):
        command = command_in(part, command)
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def harmful(results):
    return {name for name, (text, _) in results.items() if any(line.startswith("HARM") for line in text.splitlines())}


@pytest.mark.slow
@pytest.mark.parametrize("setting", [pytest.param(name, marks=[as_root] * (name != "user")) for name in SETTINGS])
def test_no_program_does_harm(setting, tmp_path):
    told = attack([setting], tmp_path)
    assert told["harm"] == [] and told["witnesses"] == [["4999950000\n", None]]
    assert harmful(told["results"]) == set()
    for name, (text, kind) in told["results"].items():
        assert kind in (None, "timeout", "crash", "output", "cpu", "disk", "threads"), (name, kind, text)
        assert "correct horse" not in text and len(text) < 20_000, name
    assert {name: told["results"][name][1] for name in KINDS} == KINDS
    assert told["results"]["exit codes of ours"][0] == "[exit code 99]"


@pytest.mark.slow
@as_root
@pytest.mark.skipif(not shutil.which(SYSTEM_PYTHON), reason=f"no {SYSTEM_PYTHON}, and root's may lie below /root")
def test_without_landlock_programs_are_other_users(tmp_path):
    told = attack(["without landlock"], tmp_path, SYSTEM_PYTHON)
    Path("/var/tmp/harm").unlink(missing_ok=True)
    assert told["harm"] == [] and told["witnesses"] == [["4999950000\n", None]]
    assert harmful(told["results"]) <= KNOWN
    assert not any("correct horse" in text for text, _ in told["results"].values())


def test_a_user_without_landlock_is_told_of_sandbox_fusion(tmp_path):
    told = attack(["without landlock", "user"], tmp_path)
    assert "no Landlock" in told["refused"] and "sandbox_fusion_url" in told["refused"]


@as_root
def test_the_settings_lack_what_they_say():
    script = "import ctypes, os; libc = ctypes.CDLL(None); print(os.geteuid(), libc.unshare(0x20000))"
    for setting, expected in (("container", "0 -1\n"), ("user", "1000 -1\n"), ("root", "0 0\n")):
        command = command_in(setting, [sys.executable, "-c", script])
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == expected
