"""scripts/check_gpu/check_gpu.sh without a GPU: its parts' commands compose, and it tells what happened."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.forked import GPU_OFFLINE, run_two_at_a_time, with_forks

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ("grpo", "dapo", "hapo", "latr", "hato", "arpo", "aepo")
ON_RUNNERS = ("runner_v1", "runner_v2", "two_gpus_v1", "two_gpus_v2")
# without `environment`, which needs a GPU
PARTS = ("inputs", "warm_start", "cold_start", *RECIPES, *ON_RUNNERS, "evaluation")


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess]:
    """The folder of the logs, and the check's own output."""
    folder = tmp_path_factory.mktemp("check")
    env = {name: value for name, value in os.environ.items() if name not in ("VERL_PLATFORM", "MODEL_PATH")}
    env |= {"DRY_RUN": "1", "CHECK_DIR": str(folder), "FORKED_COMMANDS": str(folder / "commands")}
    (done,) = run_two_at_a_time([(["bash", "scripts/check_gpu/check_gpu.sh", *PARTS], with_forks(env, [GPU_OFFLINE]))])
    return folder, done


def test_every_part_passes(dry_run):
    folder, done = dry_run
    assert done.returncode == 0, done.stdout + done.stderr
    for part in PARTS:
        assert f"\n{part} passed (" in f"\n{done.stdout}"
    assert "nothing was started" in (folder / "evaluation.log").read_text()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_composes_for_one_gpu(dry_run, recipe):
    folder, log = dry_run[0], (dry_run[0] / f"{recipe}.log").read_text()
    lines = [line.split(maxsplit=1) for line in log.splitlines() if ": " in line]
    plan = {words[0]: words[1] for words in lines if len(words) == 2}
    assert plan["model:"] == f"{folder}/inputs/model" and plan["results:"] == f"{folder}/{recipe}"
    assert plan["workers:"].startswith("1 node(s) x 1 cuda = 1, trainer fsdp2, 1 rollout replica(s) of 1")
    assert plan["one"] == "step: 8 prompts x 8 = 64 responses, 2 update(s) of 32 responses"
    assert plan["training:"] == "2 steps"
    methods = {
        "hapo": "loss_mode=hapo",
        "latr": "tree=latr",
        "hato": "tree=hato",
        "arpo": "tree=arpo",
        "aepo": "loss_mode=aepo",
    }
    assert methods.get(recipe, "tree=upstream") in plan["parts:"]


@pytest.mark.parametrize("part", ["warm_start", "cold_start"])
def test_a_warm_start_composes_for_one_gpu(dry_run, part):
    folder = dry_run[0]
    asked = map(json.loads, (folder / "commands").read_text().splitlines())
    (trainer,) = ((["python", *arguments], env) for arguments, env in asked if env["RUN_DIR"] == f"{folder}/{part}")
    config = yaml.safe_load(run_two_at_a_time([trainer])[0].stdout)
    assert config["trainer"]["device"] == "cuda" and config["optim"]["lr"] == 2e-3
    assert config["model"]["path"] == f"{folder}/inputs/model" and config["data"]["train_batch_size"] == 32
    assert Path(config["data"]["train_files"]).exists() and config["trainer"]["total_epochs"] == 1


def test_the_tiny_model_suits_flash_attention_and_flashinfer(dry_run):
    """FlashInfer knows heads of 64, 128 and 256 (vLLM 0.24's v1/attention/backends/flashinfer.py)."""
    config = json.loads((dry_run[0] / "inputs/model/config.json").read_text())
    assert config["hidden_size"] // config["num_attention_heads"] in (64, 128, 256)


@pytest.mark.parametrize(("part", "model"), [("runner_v1", "model"), ("runner_v2", "qwen3")])
def test_the_parts_of_model_runners_have_what_they_try(dry_run, part, model):
    folder, log = dry_run[0], (dry_run[0] / f"{part}.log").read_text()
    config = json.loads((folder / f"inputs/{model}/config.json").read_text())
    assert config["architectures"] == [{"model": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}[model]]
    assert config["head_dim" if model == "qwen3" else "hidden_size"] in (64, 256)
    assert f"model:    {folder}/inputs/{model}, LoRA of rank 8\n" in log and "adv_estimator=igpo" in log
    assert ("adaptive temperature" in log) == (part == "runner_v1") and "a seed for each request" in log


@pytest.mark.parametrize("part", ["two_gpus_v1", "two_gpus_v2"])
def test_two_gpus_are_used_where_there_are_two(dry_run, part):
    workers = "workers:  1 node(s) x 2 cuda = 2, trainer fsdp2, 1 rollout replica(s) of 2"
    assert workers in (dry_run[0] / f"{part}.log").read_text()


# a `python` for the script: one part fails, and the next one hangs
PYTHON = """#!/bin/sh
case "$*" in
*check_gpu_inputs*) echo "ValueError: no"; exit 7 ;;
*countdown.data*) sleep 300 ;;
esac
"""
# a `timeout` that does not wait as long
TIMEOUT = """#!/bin/sh
shift 2
exec /usr/bin/timeout 1 "$@"
"""


def run_with_shims(folder: Path, *parts: str) -> subprocess.CompletedProcess:
    for name, text in (("python", PYTHON), ("timeout", TIMEOUT)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    env = {**os.environ, "CHECK_DIR": str(folder / "out"), "VIRTUAL_ENV": sys.prefix}
    env["PATH"] = f"{folder}:{os.environ['PATH']}"
    command = ["bash", "scripts/check_gpu/check_gpu.sh", *parts]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)


def test_a_failure_and_a_hang_do_not_stop_the_rest(tmp_path):
    done = run_with_shims(tmp_path, "inputs", "warm_start", "environment")
    assert done.returncode == 1, done.stderr
    lines = [line.partition(" (")[0] for line in done.stdout.splitlines()]
    assert lines == ["environment passed", "inputs failed", "warm_start timed out"]
    assert (tmp_path / "out/inputs.log").read_text() == "ValueError: no\n"


def test_an_unknown_part_is_named(tmp_path):
    done = run_with_shims(tmp_path, "environment", "ppo")
    assert done.returncode == 2 and "error: of the parts environment ppo, 1 are known" in done.stderr
