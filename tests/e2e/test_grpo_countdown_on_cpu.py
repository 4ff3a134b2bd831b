"""The real stack on CPU: GRPO trains, a killed run ends clean and resumes, the checkpoint is a usable model.

Two launches; everything that needs the whole stack is checked on them.
"""

import json
import os
import random
import re
import subprocess
from pathlib import Path

import httpx
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipe.common.reporting.run_metrics import load_metrics
from recipe.common.tiny_model import write_tiny_model
from recipe.tasks.countdown.data import CountdownConfig, random_expression, write_countdown
from tests.e2e.learning import learn_by_heart
from tests.e2e.runs import AS_TYPED, STORAGE, End, finished, imports_made, kill, logged_steps, start_run, wait_until
from tests.recipe.tasks.countdown.solver import solve
from verl.evaluation.model.server import serving
from verl.evaluation.scores.results import parse_result_lines
from verl.trainer.checkpoint_marker import complete_steps

ROOT = Path(__file__).resolve().parents[2]
STEPS, N_VAL = 5, 32
pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    """A folder with data and a model that knows a right and a wrong answer of every problem that it is tested on."""
    folder = tmp_path_factory.mktemp("inputs")
    write_countdown(folder, CountdownConfig(train_size=64, test_size=16, demo_size=0))
    write_tiny_model(folder / "model")
    tokenizer, encoded, rng = AutoTokenizer.from_pretrained(folder / "model"), [], random.Random(0)
    for row in pd.read_parquet(folder / "test.parquet").to_dict("records"):
        truth = row["reward_model"]["ground_truth"]
        asked = tokenizer.apply_chat_template(list(row["prompt"]), add_generation_prompt=True, return_dict=False)
        for answer in (solve(truth["numbers"], truth["target"], "+-"), random_expression(truth["numbers"], "+-", rng)):
            said = tokenizer.encode(f"<answer>{answer}</answer>") + [tokenizer.eos_token_id]
            encoded.append((asked + said, [0] * len(asked) + [1] * len(said)))
    learn_by_heart(folder / "model", encoded)
    return folder


def launch(inputs: Path, **environment: str) -> subprocess.Popen:
    overrides = [f"actor_rollout_ref.rollout.val_kwargs.n={N_VAL}", f"trainer.total_training_steps={STEPS}"]
    overrides += ["trainer.save_freq=1", f"trainer.test_freq={STEPS}"]
    return start_run(inputs, "run", *overrides, **environment)


@pytest.fixture(scope="module")
def killed(inputs) -> End:
    """The end of a run, as users start it, whose storage is killed after its first step."""
    launcher = launch(inputs, **AS_TYPED)
    # a step is logged after its checkpoint is written
    wait_until(lambda: 1 in logged_steps(inputs / "run"), launcher)
    return kill(launcher, STORAGE)


def test_a_killed_process_ends_the_run_with_its_name_and_no_orphans(killed):
    assert killed.code != 0 and killed.seconds < 90 and killed.left == []
    assert re.search(rf"error: .*\(process {killed.pid} on [\w.:-]+\)", killed.errors), killed.errors


@pytest.fixture(scope="module")
def resumed(inputs, killed):
    last = complete_steps(inputs / "run")[-1]
    assert last < STEPS, "it was killed too late"
    return last, finished(launch(inputs))


def test_the_same_command_resumes_and_finishes(inputs, resumed):
    last, out = resumed
    # validation before training is logged at the step resumed from
    assert min(logged_steps(inputs / "run")) in (last, last + 1)
    metrics = load_metrics(inputs / "run")
    assert metrics["critic/score/mean"].dropna().index.tolist() == list(range(1, STEPS + 1))
    assert str(inputs / "run") in out and (inputs / "run/curves.png").exists()


def test_rollout_and_trainer_agree_after_every_weight_sync(inputs, resumed):
    difference = load_metrics(inputs / "run")["training/rollout_probs_diff_max"].dropna()
    assert len(difference) == STEPS
    assert (difference < 1e-4).all(), difference


def test_validation_reports_accuracy_and_length(inputs, resumed):
    columns = load_metrics(inputs / "run").columns
    for name in ("acc/mean@", "acc/best@", "acc/maj@", "response_length/mean@"):
        assert any(f"countdown/{name}{N_VAL}" in column for column in columns), (name, list(columns))


def test_the_checkpoint_is_exported(inputs, resumed, tmp_path):
    folder = tmp_path / "exported"
    command = ["bash", "scripts/export.sh", f"{inputs}/run", str(STEPS), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **AS_TYPED}, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    exported, start = (AutoModelForCausalLM.from_pretrained(path) for path in (folder, inputs / "model"))
    # merged from the shards; upstream saved the same weights beside them
    saved = load_file(f"{checkpoint(inputs)}/model.safetensors")
    weights = load_file(folder / "model.safetensors")
    assert weights.keys() == saved.keys() and all(torch.equal(weights[name], saved[name]) for name in saved)
    moved = [(a - b).abs().max().item() for a, b in zip(exported.parameters(), start.parameters(), strict=True)]
    assert 0 < max(moved) < 0.1 and exported.dtype == torch.float32
    assert AutoTokenizer.from_pretrained(folder).chat_template
    from vllm.config import ModelConfig

    assert ModelConfig(model=str(folder)).architectures == ["Qwen2ForCausalLM"]


@pytest.fixture(scope="module")
def server(inputs, resumed):
    """The folder that the trainer saved behind vLLM's own server; its address."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in imports_made().items():
            patch.setenv(name, value)
        with serving(checkpoint(inputs), inputs / "serve.log", ["--dtype", "float32"]) as url:
            yield url


def checkpoint(inputs: Path) -> str:
    return f"{inputs}/run/global_step_{STEPS}/actor/huggingface"


def test_vllm_serves_the_checkpoint(inputs, server):
    question = {"model": checkpoint(inputs), "messages": [{"role": "user", "content": "1 2 3 = 6"}], "max_tokens": 4}
    reply = httpx.post(f"{server}/v1/chat/completions", json=question, timeout=120, trust_env=False)
    assert reply.raise_for_status().json()["usage"]["completion_tokens"] > 0


def test_evaluation_and_the_trainers_validation_agree(inputs, server):
    """Same weights, same problems, same reward: Pass@1 and length differ by less than 4 standard errors."""
    command = ["bash", "scripts/eval-countdown.sh", "run", f"server.url={server}", f"n={N_VAL}"]
    command += [f"server.tokenizer={checkpoint(inputs)}", f"output_dir={inputs}/results"]
    env = imports_made() | {"DATA_DIR": str(inputs), "HARDWARE": "cpu"}
    output = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert output.returncode == 0, output.stderr
    (result,) = parse_result_lines(output.stdout.splitlines())
    rows = [json.loads(line) for line in (inputs / "results/run/countdown.jsonl").read_text().splitlines()[1:]]
    samples = pd.DataFrame(rows)
    # standard error of the difference of two means, each of as many samples, which are drawn question by question
    within = samples.groupby("question")[["score", "tokens"]].var().mean()
    error = (2 * within / len(samples)) ** 0.5
    validated = load_metrics(inputs / "run").loc[STEPS]
    accuracy = validated[f"val-core/countdown/acc/mean@{N_VAL}"]
    assert 0.1 < accuracy < 0.9, "else nothing is compared"
    assert result.metrics["Acc-Pass@1"] == pytest.approx(accuracy, abs=4 * error["score"])
    length = validated[f"val-aux/countdown/response_length/mean@{N_VAL}"]
    assert result.metrics["Response-Length-Mean"] == pytest.approx(length, abs=4 * error["tokens"] + 0.01)
