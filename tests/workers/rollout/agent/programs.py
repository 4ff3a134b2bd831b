"""Agents' programs for tests: functions, and commands that call them and print the result."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

SLEEP = ["sleep", "60"]


def tell(task, base_url, api_key):
    Path(os.environ["TMPDIR"], "file").write_text("for nobody")
    began = dict(entry.split("=", 1) for entry in Path("/proc/self/environ").read_text().split("\0") if entry)
    return json.dumps([task, base_url, api_key, dict(os.environ), began, os.getcwd()])


async def tell_async(task, base_url, api_key):
    return tell(task, base_url, api_key)


def exits(task, base_url, api_key):
    sys.stderr.write("loading\nno such model\n\n")
    sys.stderr.flush()
    os._exit(3)


def fails(task, base_url, api_key):
    raise ValueError("no such tool")


def is_killed(task, base_url, api_key):
    os.kill(os.getpid(), signal.SIGKILL)


def is_silent(task, base_url, api_key):
    os._exit(0)


def prints_much(task, base_url, api_key):
    for _ in range(10):
        os.write(1, b"o" * (1 << 20))
        os.write(2, b"e" * (1 << 20))
    os.write(1, b"\n")
    return "x" * 100_000


def takes_memory(task, base_url, api_key):
    return len(bytearray(task["mb"] << 20))


def starts_children(task, base_url, api_key):
    """Leave a child, one in a new session, and one in a new session without environment, whose parent has ended."""
    pids = [subprocess.Popen(SLEEP).pid, subprocess.Popen(SLEEP, start_new_session=True).pid]
    orphan = ["sh", "-c", "setsid env -i sleep 60 >&2 & echo $!"]
    pids.append(int(subprocess.run(orphan, stdout=subprocess.PIPE, check=True).stdout))
    if "file" in task:
        Path(task["file"]).write_text(json.dumps([*pids, os.getpid(), os.getppid(), os.environ["TMPDIR"]]))
    if task.get("hang"):
        time.sleep(60)
    return json.dumps(pids)


if __name__ == "__main__":
    function = globals()[sys.argv[1]]
    print(function(json.load(sys.stdin), os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]), end="\n\n")
