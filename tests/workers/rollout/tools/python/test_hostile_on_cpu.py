"""Hostile programs and cells, in each setting that the Python tool has to work in, and where it refuses to start.

Nothing reaches other sessions or the trainer, nor a session's later cells beyond names, modules and files.
"""

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.workers.rollout.tools.python.attack import SECRET, Host, outcome
from tests.workers.rollout.tools.python.settings import SETTINGS, command_in
from verl.workers.rollout.tools.python.session import NEW_SESSION
from verl.workers.rollout.tools.python.tool import AHEAD, PythonTool

ATTACK = Path(__file__).parent / "attack.py"
SYSTEM_PYTHON = "/usr/bin/python3"  # a Python that every user can read
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
    """Return the report of attack.py. Its folder is closed to other users, like a user's own."""
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
    outcome = attack([setting], tmp_path)
    assert outcome["harm"] == [] and outcome["witnesses"] == [["4999950000\n", None]]
    assert harmful(outcome["results"]) == set()
    for name, (text, kind) in outcome["results"].items():
        assert kind in (None, "timeout", "crash", "output", "cpu", "disk", "threads"), (name, kind, text)
        assert "correct horse" not in text and len(text) < 20_000, name
    assert {name: outcome["results"][name][1] for name in KINDS} == KINDS
    assert outcome["results"]["exit codes of ours"][0] == "[exit code 99]"


@pytest.mark.slow
@as_root
@pytest.mark.skipif(not shutil.which(SYSTEM_PYTHON), reason=f"no {SYSTEM_PYTHON}, and root's may lie below /root")
def test_without_landlock_programs_are_other_users(tmp_path):
    outcome = attack(["without landlock"], tmp_path, SYSTEM_PYTHON)
    Path("/var/tmp/harm").unlink(missing_ok=True)
    assert outcome["harm"] == [] and outcome["witnesses"] == [["4999950000\n", None]]
    assert harmful(outcome["results"]) <= KNOWN
    assert not any("correct horse" in text for text, _ in outcome["results"].values())


def test_a_user_without_landlock_is_told_of_sandbox_fusion(tmp_path):
    outcome = attack(["without landlock", "user"], tmp_path)
    assert "no Landlock" in outcome["refused"] and "sandbox_fusion_url" in outcome["refused"]


@as_root
def test_the_settings_lack_what_they_say():
    script = "import ctypes, os; libc = ctypes.CDLL(None); print(os.geteuid(), libc.unshare(0x20000))"
    for setting, expected in (("container", "0 -1\n"), ("user", "1000 -1\n"), ("root", "0 0\n")):
        command = command_in(setting, [sys.executable, "-c", script])
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == expected


TEXT = Path(__file__).with_name("hostile_sessions.txt").read_text(encoding="utf-8")
SESSIONS = re.findall(r"^=== ([^|\n]*?)(?: \| (ends|may end))?\n((?:(?!===).*\n)*)", TEXT, re.MULTILINE)
TIMEOUT, AT_ONCE, PAUSE, SLOW = 1.5, 3, 0.5, 60
WITNESS = "import os\nx += 1\nprint(x, sorted(os.listdir()), open('kept').read())"
FINE = "fine\n"


class Attacks:
    """Hostile sessions beside an ordinary one that must not notice them."""

    def __init__(self, host):
        self.host, self.results, self.witnesses = host, {}, []
        self.tool = PythonTool(session=True, memory_mb=256, max_file_mb=16, num_workers=AT_ONCE + 1, preload=[])

    async def run(self):
        self.left = iter(SESSIONS)
        witness = self.tool.new_session()
        begin = "import os\nx = 0\nopen('kept', 'w').write('mine')\nprint(os.getcwd(), os.getpid())"
        self.folder, pid = (await outcome(witness, begin))[0].splitlines()[-1].split()
        self.of_other = {"@OTHERDIR@": self.folder, "@OTHER@": pid}
        await asyncio.gather(self.watch(witness), *(self.attack() for _ in range(AT_ONCE)))
        await witness.close()
        assert not psutil.pid_exists(int(pid)) and not Path(self.folder).exists()
        folders = list(Path(self.folder).parent.iterdir())
        await self.tool.close()
        return folders

    async def watch(self, session):
        while len(self.results) < len(SESSIONS):
            self.witnesses.append(await outcome(session, WITNESS))
            await asyncio.sleep(0.1)

    async def attack(self):
        for name, _, cells in self.left:
            for placeholder, text in self.of_other.items():
                cells = cells.replace(placeholder, text)
            session, texts = self.tool.new_session(), []
            for cell in self.host.fill_in(cells).split("---\n"):
                texts.append(await outcome(session, cell, TIMEOUT))
                await asyncio.sleep(PAUSE)
            after = await outcome(session, "print('fine')", TIMEOUT)
            if after[1] is not None:  # the cell that found a session that cannot go on
                texts.append(after)
                after = await outcome(session, "print('fine')", SLOW)
            await session.close()
            self.results[name] = texts, after


@pytest.mark.slow
def test_hostile_cells_do_no_harm(tmp_path):
    host = Host(tmp_path)
    attacks = Attacks(host)
    try:
        folders = asyncio.run(attacks.run())
        assert host.harm() == []
    finally:
        host.sentinel.kill()
    assert len(attacks.results) == len(SESSIONS) > 30 and len(folders) <= AHEAD
    expected = [(f"{i + 1} ['kept'] mine\n", None) for i in range(len(attacks.witnesses))]
    assert attacks.witnesses == expected
    wrong = []
    for name, expected_outcome, _ in SESSIONS:
        texts, after = attacks.results[name]
        does_harm = any(line.startswith("HARM") or SECRET in line for text, _ in texts for line in text.splitlines())
        afters = {"": [FINE], "ends": [NEW_SESSION + FINE], "may end": [FINE, NEW_SESSION + FINE]}[expected_outcome]
        is_tools_fault = any("retry" in (kind or "") for _, kind in texts)
        if does_harm or after[0] not in afters or after[1] is not None or is_tools_fault:
            wrong.append((name, texts, after))
    assert wrong == []
