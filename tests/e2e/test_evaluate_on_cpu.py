"""An evaluation on a real vLLM server that it starts and stops: killed and resumed.

About a minute and a half: two starts of the server.
"""

import json
import os
import signal
import subprocess
import time

import psutil
import pytest

from recipe.common.tiny_model import write_tiny_model
from recipe.tasks.countdown.data import CountdownConfig, write_countdown
from tests.e2e.runs import ROOT, wait_until
from verl.evaluation.scores.results import parse_result_lines

N = 64
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluate")
    write_countdown(folder, CountdownConfig(train_size=8, test_size=8, demo_size=0))
    write_tiny_model(folder / "model")
    return folder


def start(inputs) -> subprocess.Popen:
    command = ["bash", "scripts/eval-countdown.sh", "tiny", f"model={inputs}/model"]
    command += [f"n={N}", f"output_dir={inputs}/out"]
    env = {**os.environ, "DATA_DIR": str(inputs), "HARDWARE": "cpu"}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    return subprocess.Popen(command, cwd=ROOT, env=env, **options)


def rows_of(inputs) -> list[dict]:
    lines = (inputs / "out/tiny/countdown.jsonl").read_bytes().splitlines()
    return [json.loads(line) for line in lines[1:]]


def test_a_killed_evaluation_leaves_no_server_and_goes_on_where_it_was(inputs):
    file = inputs / "out/tiny/countdown.jsonl"
    process = start(inputs)
    wait_until(lambda: file.exists() and len(file.read_bytes().splitlines()) > 20, process)
    started = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)  # Ctrl-C
    process.wait(60)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and any(p.is_running() and p.status() != "zombie" for p in started):
        time.sleep(0.2)
    assert not [p for p in started if p.is_running() and p.status() != "zombie"], "the server is gone"
    kept = rows_of(inputs)

    process = start(inputs)
    printed, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    rows = rows_of(inputs)
    assert len(rows) == 8 * N and rows[: len(kept)] == kept
    (result,) = parse_result_lines(printed.splitlines())
    assert result.metrics["Acc-Pass@1"] == pytest.approx(sum(row["score"] for row in rows) / len(rows))
