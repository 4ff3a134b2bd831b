"""Every run script composes and validates its config with DRY_RUN=1, tells its plan and starts nothing."""

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import pytest
from omegaconf import OmegaConf

from recipe.common.tiny_model import TinyModelConfig, write_tiny_model
from recipe.tasks.countdown.data import CountdownConfig, write_countdown
from recipe.tasks.search.data import EXTRA_WORDS, SearchTaskConfig, write_search_task
from recipe.tasks.walk.data import MODEL, WalkConfig, write_walks
from recipe.tasks.word_problems.data import WordProblemsConfig, write_word_problems
from tests.configs import composed
from tests.forked import CPU, run_two_at_a_time, with_forks
from verl.trainer.checks.settle import settle

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(
    str(path.relative_to(ROOT))
    for path in (ROOT / "recipe").glob("*/*.sh")
    # the first four are called by the others; warm start and SFT are upstream's SFT trainer
    if path.name
    not in (
        "run_countdown.sh",
        "run_math.sh",
        "small_tasks.sh",
        "run_smollm2.sh",
        "run_warm_start.sh",
        "run_sft.sh",
        "run_search_task_sft_cpu.sh",
        "eval.sh",
        "run_compare.sh",  # runs the other scripts
    )
)


class DryRun(NamedTuple):
    """The result of a script, and its trainer's arguments (without the module's name) and environment."""

    result: subprocess.CompletedProcess
    arguments: list[str]
    environment: dict[str, str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("é=(1), dry")


@pytest.fixture(scope="module")
def dry_runs(folder) -> dict[str, DryRun]:
    """Script -> its dry run."""
    write_countdown(folder, CountdownConfig(train_size=600, test_size=8, demo_size=0))
    write_tiny_model(folder / "model")
    row = {"data_source": "math_dapo", "prompt": [{"role": "user", "content": "1+1?"}]}
    row["reward_model"] = {"style": "rule", "ground_truth": "2"}
    pd.DataFrame([row] * 600).to_parquet(folder / "math.parquet")
    env = {name: value for name, value in os.environ.items() if name not in ("VERL_PLATFORM", "HF_HUB_OFFLINE")}
    env |= {"DRY_RUN": "1", "DATA_DIR": str(folder), "RUN_DIR": str(folder / "run")}
    write_word_problems(folder / "word_problems", WordProblemsConfig(train_size=16, valid_size=4, test_size=0))
    for file in (folder / "word_problems").glob("*.parquet"):  # the tiny model has a token for each letter
        rows = pd.read_parquet(file)
        rows.assign(prompt=[row["prompt"]] * len(rows)).to_parquet(file)
    (folder / "search").mkdir()
    for name in ("train", "test"):
        pd.DataFrame([row | {"data_source": "search_task"}] * 600).to_parquet(folder / f"search/{name}.parquet")
    (folder / "search/corpus.jsonl").touch()
    env |= {"BRIGHTDATA_API_KEY": "none", "BRIGHTDATA_ZONE": "none"}
    env |= {"TRAIN_FILE": f"{folder}/math.parquet", "VAL_FILE": f"{folder}/math.parquet"}

    def command_of(script: str) -> tuple[list[str], dict[str, str]]:
        own = {"FORKED_COMMANDS": f"{folder}/{script.replace('/', '_')}.json"}
        if any(word in script for word in ("_cpu", "countdown", "explore")):
            own["MODEL_PATH"] = str(folder / "model")
        if "smollm2" in script:
            own["DATA_DIR"] = str(folder / "word_problems")
        if "search_task" in script:
            own["DATA_DIR"] = str(folder / "search")
        return ["bash", script], with_forks(env | own)

    commands = [command_of(script) for script in SCRIPTS]
    results = run_two_at_a_time(commands)
    assert not (folder / "run").exists()

    def dry_run(result: subprocess.CompletedProcess, environment: dict[str, str]) -> DryRun:
        (line,) = Path(environment["FORKED_COMMANDS"]).read_text().splitlines()
        (_, module, *arguments), trainers = json.loads(line)
        assert module == "verl.trainer.main_ppo"
        return DryRun(result, arguments, trainers)

    return {
        script: dry_run(result, environment)
        for script, result, (_, environment) in zip(SCRIPTS, results, commands, strict=True)
    }


def test_no_environment_variable_is_read_after_the_drivers_checks(dry_runs, folder, monkeypatch):
    """Upstream resolves the config in an actor whose environment is its node's: it must find nothing left to ask."""
    settled = {}
    # one script for all that differ in values alone
    groups = {
        tuple(word for word in run.arguments if "." not in word.partition("=")[0]): script
        for script, run in dry_runs.items()
    }
    for script in groups.values():
        command = dry_runs[script]
        environment = command.environment | {"NNODES": "3", "N_GPUS_PER_NODE": "5", "RAY_ADDRESS": "10.0.0.1:6379"}
        monkeypatch.setattr(os, "environ", environment)
        options, overrides = command.arguments[:4], command.arguments[4:]
        assert options[::2] == ["--config-dir", "--config-name"]
        config = composed(options[3], *overrides, recipe=Path(options[1]).parent.name)
        settle(config)
        assert config.trainer.nnodes == 3
        assert config.actor_rollout_ref.rollout.agent.num_workers == (3 * 8 if config.trainer.device == "cuda" else 1)
        OmegaConf.save(config, folder / "settled.yaml")
        settled[script] = {
            "here": OmegaConf.to_container(config, resolve=True),
            "yaml": (folder / "settled.yaml").read_text(),
        }
    monkeypatch.undo()
    (folder / "settled.json").write_text(json.dumps(settled))
    elsewhere = f"""
import json, yaml
yaml.SafeLoader = yaml.CSafeLoader
from omegaconf import OmegaConf
for script, config in json.load(open({str(folder / "settled.json")!r})).items():
    there = OmegaConf.to_container(OmegaConf.create(config["yaml"]), resolve=True)
    assert json.loads(json.dumps(there)) == config["here"], script
"""
    subprocess.run([sys.executable, "-c", elsewhere], env={}, check=True)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_dry_run_checks_and_tells_the_plan(dry_runs, script):
    result = dry_runs[script].result
    assert result.returncode == 0, result.stderr[-2000:]
    assert "nothing was started" in result.stdout and "responses" in result.stdout
    assert "Started a local Ray instance" not in result.stderr


def test_the_hapo_scripts_have_the_papers_sizes(dry_runs):
    """The paper has 8 nodes x 8 GPUs, 512 x 16 responses, 16 updates of 32 x 16, and 1024 + 12288 tokens."""
    plan = dry_runs["recipe/hapo/run_qwen3_8b.sh"].result.stdout
    for part in (
        "= 64",
        "512 prompts x 16 = 8192",
        "16 update(s) of 512",
        "at most 13312",
        "64 rollout replica(s) of 1",
        "adaptive temperature (tau 0.05)",
    ):
        assert part in plan, plan


def test_a_rollout_engine_takes_the_fewest_gpus_for_its_model(dry_runs):
    """Weights of 2 bytes a parameter fill at most a quarter of 80 GB: the rest is for the KV cache."""
    plans = [run.result.stdout for run in dry_runs.values() if " cuda = " in run.result.stdout]
    sizes = {plan: float(size[1]) for plan in plans if (size := re.search(r"model: .*?([\d.]+)B\b", plan))}
    assert len(sizes) > 10
    for plan, billions in sizes.items():
        fewest = next(gpus for gpus in (1, 2, 4, 8) if 2 * billions / gpus <= 80 / 4)
        assert f"rollout replica(s) of {fewest}\n" in plan, plan


@pytest.mark.parametrize("script", ["hapo/run_qwen2.5_math_7b_lora", "latr/grpo-kt-math-7b-lora"])
def test_the_lora_scripts_train_factors_on_one_gpu(dry_runs, script):
    plan = dry_runs[f"recipe/{script}.sh"].result.stdout
    for part in ("LoRA of rank 32", "1 node(s) x 1 cuda = 1"):
        assert part in plan, plan


@pytest.mark.parametrize("task", ["countdown", "math"])
@pytest.mark.parametrize("method", ["grpo", "dapo"])
def test_the_latr_scripts_come_in_pairs_that_differ_in_the_rollout_only(dry_runs, method, task):
    kt, vllm = (dry_runs[f"recipe/latr/{method}-{rollout}-{task}.sh"].result.stdout for rollout in ("kt", "vllm"))
    assert "tree=latr" in kt and "256 prompts x 8 = 2048" in kt and "500" in kt
    assert kt.replace("tree=latr", "tree=upstream") == vllm


def test_every_recipe_trains_on_the_number_walk(tmp_path):
    write_walks(tmp_path, WalkConfig(train_size=16, valid_size=4, test_size=0, demo_size=0))
    write_tiny_model(tmp_path / "model", MODEL)
    scripts = ["common/run_dapo_countdown", *(f"{recipe}/run_countdown_cpu" for recipe in ("hapo", "latr", "hato"))]
    env = {name: value for name, value in os.environ.items() if name not in ("VERL_PLATFORM", "EXPERIMENT_NAME")}
    env |= {"TASK": "walk", "DRY_RUN": "1", "DATA_DIR": str(tmp_path), "MODEL_PATH": str(tmp_path / "model")}
    environments = [with_forks(env | {"FORKED_COMMANDS": str(tmp_path / f"{i}.json")}) for i in range(len(scripts))]
    results = run_two_at_a_time(
        [(["bash", f"recipe/{script}.sh"], own) for script, own in zip(scripts, environments, strict=True)]
    )
    for result in results:
        assert result.returncode == 0, result.stderr[-2000:]
        for part in ("(24 + 40)", "_walk_seed0"):
            assert part in result.stdout, result.stdout
    (_, _, *arguments), _ = json.loads((tmp_path / "3.json").read_text())
    config = composed(arguments[3], *arguments[4:], recipe=Path(arguments[1]).parent.name)
    assert config.hato.tree.step_delimiter == "\n" and config.data.val_files == f"{tmp_path}/valid.parquet"
    assert config.reward.custom_reward_function.path == "pkg://recipe.tasks.walk.reward"


def test_the_search_task_takes_questions_of_several_hops(tmp_path):
    """Five hops take prompts of 20 + 2 x 5 tokens, responses of 76 + 26 x 5, and 5 searches and a computation."""
    sizes = SearchTaskConfig(people=20, train_size=16, test_size=8, demo_size=8, min_hops=3, max_hops=5)
    asyncio.run(write_search_task(tmp_path, sizes))
    write_tiny_model(tmp_path / "model", TinyModelConfig(extra_words=EXTRA_WORDS))
    env = {name: value for name, value in os.environ.items() if name not in ("VERL_PLATFORM", "EXPERIMENT_NAME")}
    env |= {"HOPS": "3-5", "DRY_RUN": "1", "DATA_DIR": str(tmp_path), "MODEL_PATH": str(tmp_path / "model")}
    env = with_forks(env | {"FORKED_COMMANDS": str(tmp_path / "commands.json")}, [CPU])
    scripts = ("run_search_task_sft_cpu", "run_search_task_cpu")
    results = run_two_at_a_time([(["bash", f"recipe/arpo/{script}.sh"], env) for script in scripts])
    for result, part in zip(results, ("7 responses to learn", "(30 + 206)"), strict=True):
        assert result.returncode == 0, result.stderr[-2000:]
        assert part in result.stdout, result.stdout
    arguments = (tmp_path / "commands.json").read_text()
    for part in ("search_task_3-5hops_sft", "arpo_search_task_3-5hops_seed0", "tools.call_limit=6"):
        assert part in arguments


def test_a_dry_run_names_a_missing_file(tmp_path):
    env = {**os.environ, "DRY_RUN": "1", "DATA_DIR": str(tmp_path), "MODEL_PATH": "/nowhere/model"}
    (result,) = run_two_at_a_time([(["bash", "recipe/hapo/run_countdown_cpu.sh"], with_forks(env))])
    assert result.returncode != 0 and "/nowhere/model does not exist" in result.stderr
