"""The real stack on CPU: GRPO trains, a killed run ends clean and resumes, the checkpoint is a usable model.

Two launches of about 100 s each; everything that needs the whole stack is checked on them.
"""

import json
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest
import torch

from recipe.common.run_metrics import load_metrics
from tests.e2e.runs import kill_one, start_run, wait_until
from verl.trainer.checkpoint_marker import complete_steps

ROOT = Path(__file__).resolve().parents[2]
STEPS = 4
pytestmark = pytest.mark.e2e


def launch(inputs: Path) -> subprocess.Popen:
    overrides = [f"trainer.total_training_steps={STEPS}", "trainer.save_freq=1", "trainer.test_freq=2"]
    return start_run(inputs, "run", *overrides)


@pytest.fixture(scope="module")
def killed(inputs):
    """A run whose vLLM engine got SIGKILL in mid-run, after its first checkpoint."""
    launcher = launch(inputs)
    wait_until(lambda: bool(complete_steps(inputs / "run")), launcher)
    return kill_one(launcher, "EngineCore")


def test_a_killed_engine_ends_the_run_with_a_message_and_no_orphans(killed):
    code, errors, alive = killed
    assert code != 0
    assert "The run failed" in errors and "train.log" in errors and "resumes" in errors
    assert alive == []


@pytest.fixture(scope="module")
def resumed(inputs, killed):
    last = complete_steps(inputs / "run")[-1]
    launcher = launch(inputs)
    out, errors = launcher.communicate(timeout=550)
    assert launcher.returncode == 0, errors
    return last, out


def test_the_same_command_resumes_and_finishes(inputs, resumed):
    last, out = resumed
    first_logged = [json.loads(line)["step"] for line in open(inputs / "run/metrics.jsonl")]
    assert min(first_logged) in (last, last + 1)  # validation before training is logged at the step resumed from
    metrics = load_metrics(inputs / "run")
    assert metrics["critic/score/mean"].dropna().index.tolist() == list(range(1, STEPS + 1))
    assert str(inputs / "run") in out and (inputs / "run/curves.png").exists()


def test_rollout_and_trainer_agree_after_every_weight_sync(inputs, resumed):
    difference = load_metrics(inputs / "run")["training/rollout_probs_diff_max"].dropna()
    assert len(difference) == STEPS
    assert (difference < 1e-4).all(), difference


def test_validation_reports_accuracy_and_length(inputs, resumed):
    columns = load_metrics(inputs / "run").columns
    for name in ("acc/mean@2", "acc/best@2/mean", "acc/maj@2/mean", "response_length/mean@2"):
        assert any(column.endswith(f"countdown/{name}") for column in columns), (name, list(columns))


def test_the_checkpoint_merges_to_a_model_for_transformers(inputs, resumed, tmp_path):
    merge = [sys.executable, "-m", "verl.model_merger", "merge", "--backend", "fsdp"]
    merge += ["--local_dir", f"{inputs}/run/global_step_{STEPS}/actor", "--target_dir", str(tmp_path / "merged")]
    env = {**os.environ, "VERL_PLATFORM": "cpu"}
    subprocess.run(merge, check=True, capture_output=True, env=env, cwd=ROOT)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    start = AutoModelForCausalLM.from_pretrained(inputs / "model", dtype=torch.float32)
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").chat_template
    moved = [(a - b).abs().max().item() for a, b in zip(trained.parameters(), start.parameters(), strict=True)]
    assert 0 < max(moved) < 0.1


@pytest.fixture
def server(inputs, resumed):
    """The folder that the trainer saved behind scripts/serve.sh, vLLM's own server; its address."""
    folder = f"{inputs}/run/global_step_{STEPS}/actor/huggingface"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["bash", "scripts/serve.sh", folder, "--served-model-name", "trained"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    with open(f"{inputs}/serve.log", "w") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
    try:
        wait_until(lambda: answers(f"http://127.0.0.1:{port}/health"), process)
        yield f"http://127.0.0.1:{port}"
    finally:
        for started in [*psutil.Process(process.pid).children(recursive=True), process]:
            started.kill()
        process.wait(timeout=60)


def answers(url: str) -> bool:
    try:
        return urllib.request.urlopen(url, timeout=5).status == 200
    except (urllib.error.URLError, OSError):
        return False


def test_vllm_serves_the_checkpoint(server):
    question = {"model": "trained", "messages": [{"role": "user", "content": "1 2 3 = 6"}], "max_tokens": 4}
    request = urllib.request.Request(
        f"{server}/v1/chat/completions", json.dumps(question).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        assert json.load(reply)["usage"]["completion_tokens"] > 0
