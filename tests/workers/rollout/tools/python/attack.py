"""Runs the hostile programs in the setting that this process is in, and prints what became of each as JSON.

    python attack.py FOLDER [INTERPRETER]

Four run at a time, beside an ordinary program that must not notice. What they must not harm is made in FOLDER and
looked at after all. hostile_programs.txt holds the programs and tells what is filled in.
"""

import asyncio
import json
import os
import re
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil

from verl.workers.rollout.tools.base_tool import ToolError
from verl.workers.rollout.tools.python.tool import AHEAD, PythonTool

SYSCALL = """
import ctypes, os, platform
libc = ctypes.CDLL(None, use_errno=True)
def syscall(x86, arm, *args):
    number = x86 if platform.machine() == "x86_64" else arm
    return libc.syscall(ctypes.c_long(number), *(ctypes.c_long(a) if isinstance(a, int) else a for a in args))
"""
TEXT = (Path(__file__).parent / "hostile_programs.txt").read_text(encoding="utf-8")
PROGRAMS = dict(re.findall(r"^=== (.*)\n((?:(?!===|###).*\n)*)", TEXT, re.MULTILINE))
PROGRAMS |= {"deep nesting": "(" * 100_000, "NUL and half a pair": "print('\x00\ud800')"}
SECRET = "correct horse battery staple"
AT_ONCE, TIMEOUT, MARK = 4, 1.5, 70000
TIMEOUTS = {
    "deep C recursion": 15,
    "many files": 15,
    "many empty files": 15,
    "removed files after the main thread's end": 15,
}


class Host:
    """The files, process and sockets that the programs must not harm."""

    def __init__(self, folder: Path):
        self.secret, self.keep = folder / "secret", folder / "keep" / "file"
        self.keep.parent.mkdir()
        self.secret.write_text(SECRET)
        self.keep.write_text("kept")
        self.sentinel = subprocess.Popen(["sleep", "600"])
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.datagrams.bind(self.listener.getsockname())
        self.abstract = socket.socket(socket.AF_UNIX)
        self.abstract.bind(f"\0sandbox-{os.getpid()}")
        self.abstract.listen()
        for sock in (self.listener, self.datagrams, self.abstract):
            sock.setblocking(False)
        while psutil.Process(self.sentinel.pid).status() != psutil.STATUS_SLEEPING:
            time.sleep(0.01)
        self.before = self.state()

    def state(self) -> dict:
        sentinel = psutil.Process(self.sentinel.pid)
        status = [os.stat(path) for path in (self.keep, self.keep.parent, self.secret)]
        return {
            "files": [self.keep.read_text(), self.secret.read_text(), os.listdir(self.keep.parent)],
            "attributes": [[s.st_mode, s.st_uid, s.st_gid, s.st_nlink, s.st_mtime] for s in status],
            "xattr": os.listxattr(self.keep),
            "sentinel": [sentinel.status(), sentinel.cpu_affinity()],
            "limits": [resource.getrlimit(resource.RLIMIT_NOFILE), os.getpriority(os.PRIO_PROCESS, 0)],
        }

    def harm(self) -> list[str]:
        """Return what has changed, who has connected, and which processes are left."""
        after = self.state()
        harm = [f"{name}: {self.before[name]} -> {after[name]}" for name in after if after[name] != self.before[name]]
        for name, receive in (("TCP", self.listener.accept), ("UDP", lambda: self.datagrams.recv(1))):
            try:
                harm.append(f"{name}: {receive()}")
            except BlockingIOError:
                continue
        for process in psutil.process_iter(["cmdline"]):
            harm += [f"left: {process}" for argument in process.info["cmdline"] or () if argument.startswith("7000")]
        return harm

    def fill_in(self, program: str) -> str:
        values = {"PARENT": os.getpid(), "SENTINEL": self.sentinel.pid, "PORT": self.listener.getsockname()[1]}
        values |= {"SECRET": self.secret, "KEEP": self.keep, "KEEPDIR": self.keep.parent, "MARK": MARK}
        values |= {"ABSTRACT": f"sandbox-{os.getpid()}", "SYSCALL": SYSCALL}
        return re.sub("@([A-Z]+)@", lambda match: str(values[match[1]]), program)


async def outcome(tool: PythonTool, program: str, timeout: float = 60) -> tuple[str, str | None]:
    try:
        return await tool.execute(program, timeout=timeout), None
    except ToolError as error:
        return str(error), f"{error.kind}{', retry' if error.retry else ''}"


async def main(folder: Path, interpreter: str | None) -> dict:
    host, results, witnesses = Host(folder), {}, set()
    tool = PythonTool(python_path=interpreter, memory_mb=256, max_file_mb=16, num_workers=AT_ONCE + 1, preload=[])
    started = time.monotonic()
    try:
        await tool.start(timeout=60)
    except ToolError as error:
        host.sentinel.kill()
        return {"refused": str(error)}
    left = iter(PROGRAMS.items())

    async def attack() -> None:
        for name, program in left:
            results[name] = await outcome(tool, host.fill_in(program), TIMEOUTS.get(name, TIMEOUT))

    async def witness() -> None:
        while len(results) < len(PROGRAMS):
            witnesses.add(await outcome(tool, "import time\ntime.sleep(0.1)\nprint(sum(range(10**5)))"))

    await asyncio.gather(witness(), *(attack() for _ in range(AT_ONCE)))
    server = psutil.Process(tool._interpreters[False]._process.pid)
    until = time.monotonic() + 20
    while len(left_over := server.children(recursive=True)) > AHEAD and time.monotonic() < until:
        await asyncio.sleep(0.05)
    files = [str(path) for path in Path(tool._interpreters[False]._folder).glob("*/*")]
    harm = host.harm() + [f"processes: {left_over}"] * (len(left_over) > AHEAD) + files
    await tool.close()
    host.sentinel.kill()
    return {"results": results, "harm": harm, "witnesses": list(witnesses), "seconds": time.monotonic() - started}


if __name__ == "__main__":
    os.environ["SANDBOX_TEST_SECRET"] = SECRET
    print(json.dumps(asyncio.run(main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None))))
