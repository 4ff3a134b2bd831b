"""The real stack on CPU: GRPO trains, a killed run ends clean and resumes, the checkpoint is a usable model.

Two launches of about 100 s each; everything that needs the whole stack is checked on them.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from recipe.common.countdown import CountdownConfig, write_countdown
from recipe.common.run_metrics import load_metrics
from recipe.common.tiny_model import write_tiny_model
from verl.trainer.checkpoint_marker import complete_steps

ROOT = Path(__file__).resolve().parents[2]
STEPS = 4
pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("grpo")
    write_countdown(folder, CountdownConfig(train_size=64, test_size=4, demo_size=0))
    write_tiny_model(folder / "model")
    return folder


def launch(inputs: Path) -> subprocess.Popen:
    """The user's command; a fresh process group, so that a test that fails can end it."""
    command = ["bash", "recipe/common/run_grpo_countdown.sh"]
    command += ["data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4"]
    command += ["actor_rollout_ref.rollout.n=4", "actor_rollout_ref.rollout.val_kwargs.n=2"]
    command += [f"trainer.total_training_steps={STEPS}", "trainer.save_freq=1", "trainer.test_freq=2"]
    env = {**os.environ, "HARDWARE": "cpu", "MODEL_PATH": f"{inputs}/model", "DATA_DIR": str(inputs)}
    env |= {"EXPERIMENT_NAME": "e2e", "RUN_DIR": f"{inputs}/run"}
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=env)


def descendants(launcher: subprocess.Popen) -> list[psutil.Process]:
    return psutil.Process(launcher.pid).children(recursive=True)


def wait_for_checkpoint(inputs: Path, launcher: subprocess.Popen) -> None:
    deadline = time.monotonic() + 300
    while not complete_steps(inputs / "run"):
        assert launcher.poll() is None, launcher.communicate()[1]
        assert time.monotonic() < deadline, "no checkpoint within 300 s"
        time.sleep(0.2)


@pytest.fixture(scope="module")
def killed(inputs):
    """A run whose vLLM engine got SIGKILL in mid-run, after its first checkpoint."""
    launcher = launch(inputs)
    try:
        wait_for_checkpoint(inputs, launcher)
        started = descendants(launcher)
        (engine, *_) = [p for p in started if "EngineCore" in " ".join(p.cmdline())]
        engine.kill()
        _, errors = launcher.communicate(timeout=300)
    finally:
        launcher.kill()
    return launcher.returncode, errors, started


def test_a_killed_engine_ends_the_run_with_a_message_and_no_orphans(killed):
    code, errors, started = killed
    assert code != 0
    assert "The run failed" in errors and "train.log" in errors and "resumes" in errors
    assert [p for p in started if p.is_running() and p.status() != psutil.STATUS_ZOMBIE] == []


@pytest.fixture(scope="module")
def resumed(inputs, killed):
    last = complete_steps(inputs / "run")[-1]
    launcher = launch(inputs)
    out, errors = launcher.communicate(timeout=400)
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
