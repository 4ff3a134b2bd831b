"""Hostile cells: nothing reaches other sessions or the trainer, nor later cells beyond names, modules and files."""

import asyncio
import re
from pathlib import Path

import psutil
import pytest

from tests.workers.rollout.tools.python.attack import SECRET, Host, told
from verl.workers.rollout.tools.python.session import NEW_SESSION
from verl.workers.rollout.tools.python.tool import AHEAD, PythonTool

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
        where = await told(
            witness, "import os\nx = 0\nopen('kept', 'w').write('mine')\nprint(os.getcwd(), os.getpid())"
        )
        self.folder, pid = where[0].splitlines()[-1].split()
        self.of_other = {"@OTHERDIR@": self.folder, "@OTHER@": pid}
        await asyncio.gather(self.watch(witness), *(self.attack() for _ in range(AT_ONCE)))
        await witness.close()
        assert not psutil.pid_exists(int(pid)) and not Path(self.folder).exists()
        folders = list(Path(self.folder).parent.iterdir())
        await self.tool.close()
        return folders

    async def watch(self, session):
        while len(self.results) < len(SESSIONS):
            self.witnesses.append(await told(session, WITNESS))
            await asyncio.sleep(0.1)

    async def attack(self):
        for name, _, cells in self.left:
            for placeholder, text in self.of_other.items():
                cells = cells.replace(placeholder, text)
            session, texts = self.tool.new_session(), []
            for cell in self.host.fill_in(cells).split("---\n"):
                texts.append(await told(session, cell, TIMEOUT))
                await asyncio.sleep(PAUSE)
            after = await told(session, "print('fine')", TIMEOUT)
            if after[1] is not None:  # the cell that found a session that cannot go on
                texts.append(after)
                after = await told(session, "print('fine')", SLOW)
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
    for name, outcome, _ in SESSIONS:
        texts, after = attacks.results[name]
        does_harm = any(line.startswith("HARM") or SECRET in line for text, _ in texts for line in text.splitlines())
        afters = {"": [FINE], "ends": [NEW_SESSION + FINE], "may end": [FINE, NEW_SESSION + FINE]}[outcome]
        is_tools_fault = any("retry" in (kind or "") for _, kind in texts)
        if does_harm or after[0] not in afters or after[1] is not None or is_tools_fault:
            wrong.append((name, texts, after))
    assert wrong == []
