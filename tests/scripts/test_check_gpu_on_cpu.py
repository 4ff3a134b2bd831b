"""scripts/check_gpu/check_gpu.sh without a GPU: its parts' commands compose, and what runs them tells what happened."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from tests.forked import GPU_OFFLINE, run_two_at_a_time, with_forks

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ("grpo", "dapo", "hapo", "latr", "hato", "arpo", "aepo")
# benchmarks/gpu_kernels.py has a test of its own
ON_RUNNERS = ("runner_v1", "runner_v2", "two_gpus_v1", "two_gpus_v2")
PARTS = ("environment", "inputs", "warm_start", "cold_start", *RECIPES, *ON_RUNNERS, "evaluation")


@pytest.fixture
def parts(monkeypatch):
    """The table of parts, imported as scripts/check_gpu/check_gpu.py does it."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts/check_gpu"))
    import check_gpu_parts

    return check_gpu_parts.PARTS


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
        assert f"| {part} | passed |" in (folder / "table.md").read_text()
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
    assert "adaptive temperature" in log and "a seed for each request" in log


@pytest.mark.parametrize("part", ["two_gpus_v1", "two_gpus_v2"])
def test_two_gpus_are_used_where_there_are_two(dry_run, part):
    workers = "workers:  1 node(s) x 2 cuda = 2, trainer fsdp2, 1 rollout replica(s) of 2"
    assert workers in (dry_run[0] / f"{part}.log").read_text()


def test_an_hour_is_enough(parts):
    assert sum(part.seconds for part in parts) <= 60 * 60
    assert len({part.name for part in parts}) == len(parts)
    assert set(PARTS) == {part.name for part in parts} - {"kernels"}


def run_parts(folder: Path, parts: str, **environment: str) -> subprocess.CompletedProcess:
    """The check with other parts, in a process of its own: it ends everything below it."""
    program = "import sys; sys.path.insert(0, 'scripts/check_gpu'); import check_gpu; from check_gpu import Part\n"
    program += f"check_gpu.PARTS = {parts}\nsys.exit(check_gpu.main([]))"
    env = {**os.environ, "CHECK_DIR": str(folder), **environment}
    return subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120
    )


def rows_of(folder: Path) -> list[list[str]]:
    return [line.strip("| ").split(" | ") for line in (folder / "table.md").read_text().splitlines()[2:]]


def test_a_failure_and_a_hang_do_not_stop_the_rest(tmp_path):
    smi = tmp_path / "bin/nvidia-smi"
    smi.parent.mkdir()
    smi.write_text("#!/bin/sh\nprintf '100\\n23456\\n'\n")
    smi.chmod(0o755)
    pid_file = tmp_path / "pid"
    hang = f"setsid sleep 300 & echo $! > {pid_file}; sleep 300"
    fail = "echo 'ValueError: a | b is wrong'; echo 'Whole log: here'; exit 7"
    parts = f"(Part('fails', 60, {fail!r}), Part('hangs', 2, {hang!r}), Part('passes', 60, 'echo $RUN_DIR; sleep 1'), "
    parts += "Part('slow', 1, 'sleep 1.2'), Part('wide', 60, 'false', gpus=3))"
    out = tmp_path / "out"
    started = time.monotonic()
    done = run_parts(out, parts, PATH=f"{smi.parent}:{os.environ['PATH']}")
    assert time.monotonic() - started < 60
    assert done.returncode == 1, done.stderr
    fails, hangs, passes, slow, wide = rows_of(out)
    assert fails[:2] == ["fails", "FAILED"] and fails[4] == "ValueError: a / b is wrong"
    assert hangs[:2] == ["hangs", "FAILED"] and hangs[4].startswith("not done in 4 s")
    assert slow[:2] == ["slow", "passed, slowly"] and wide[1:5:3] == ["not run", "it needs 3 GPUs"]
    assert passes[:2] == ["passes", "passed"] and passes[3] == "23,456"
    assert (out / "passes.log").read_text() == f"{out}/passes\n"
    assert not psutil.pid_exists(int(pid_file.read_text()))


def test_after_a_failed_environment_nothing_else_is_run(tmp_path):
    parts = "(Part('environment', 60, 'echo no driver; exit 1'), Part('grpo', 60, 'touch $CHECK_DIR/ran'))"
    assert run_parts(tmp_path, parts).returncode == 1
    assert [row[:2] for row in rows_of(tmp_path)] == [["environment", "FAILED"], ["grpo", "not run"]]
    assert not (tmp_path / "ran").exists()


def test_an_unknown_part_is_named():
    done = subprocess.run(
        [sys.executable, "scripts/check_gpu/check_gpu.py", "ppo"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and "error: no part ppo; choose of environment kernels" in done.stderr
