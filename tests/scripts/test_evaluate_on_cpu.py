"""The evaluation scripts' plans, checkpoints and numbers by hand; with servers: tests/recipe/common, tests/e2e."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pandas as pd
import pytest
from omegaconf import OmegaConf

from tests.configs import composed
from tests.forked import CPU, run_two_at_a_time, with_forks
from tests.tables import table
from verl.evaluation.main import _files_under_outputs
from verl.evaluation.model.checkpoint import Checkpoint, find_checkpoint, fingerprint
from verl.evaluation.questions.prompts import Question
from verl.evaluation.scores.scoring import find_scoring
from verl.trainer.checkpoint_marker import MARKER
from verl.utils.parts import parts

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


FOUND = r"</search> <result>the page says \boxed{7}</result>"


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        (rf"<think>x</think><search>q{FOUND}", "7", 0.0),
        (rf"\boxed{{7}} or <search>q{FOUND.replace('7', '9')}", "7", 1.0),
        (r"<think>x</think> <result>\boxed{7}</result>", "7", 1.0),  # the model's own text
        (r"<search>q</search> <result>cut off \boxed{7}", "7", 0.0),
    ],
)
@pytest.mark.parametrize("scoring", ["math", "qa"])
def test_a_tools_text_is_no_answer(scoring, response, truth, score):
    assert find_scoring(scoring).score(Question("1", "?", [], [truth]), response).score == score


def test_training_files_are_not_evaluated(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "outputs/data/math"
    folder.mkdir(parents=True)
    trained = pd.DataFrame([{"data_source": "x", "prompt": "p", "reward_model": "r"}])
    for name in ("dapo-math-17k", "valid", "test", "math"):
        trained.to_parquet(folder / f"{name}.parquet")
    pd.DataFrame([{"messages": ["p", "1"]}]).to_parquet(folder / "sft.parquet")
    pd.DataFrame([{"problem": "p", "answer": "1"}]).to_parquet(folder / "of_the_hub.parquet")
    stems = [Path(file).stem for file in _files_under_outputs("math")]
    assert stems == ["math", "of_the_hub", "test"]


def test_shards_are_to_be_merged_unless_the_trainer_saved_a_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for step in (5, 10):
        actor = tmp_path / f"outputs/run/global_step_{step}/actor"
        (actor / "huggingface").mkdir(parents=True)
        if step == 5:
            with pytest.raises(ValueError, match="no complete checkpoint"):
                find_checkpoint("run", None)
        (actor.parent / MARKER).touch()
    (tmp_path / "outputs/run/global_step_5/actor/huggingface/model.safetensors").touch()
    folder = Path("outputs/run")
    saved = folder / "global_step_5/actor/huggingface"
    merged, shards = folder / "global_step_10/merged", folder / "global_step_10/actor"
    assert find_checkpoint("run", 5) == (str(saved), 5, None)
    assert find_checkpoint("run", None) == (str(merged), 10, shards)
    merged.mkdir()
    assert find_checkpoint("run", 10) == (str(merged), 10, None)


def test_other_weights_in_the_same_folder_are_told_apart(tmp_path):
    file = tmp_path / "outputs/run/global_step_5/actor/model_world_size_1_rank_0.pt"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"a" * (3 << 20))
    merged = Checkpoint(str(tmp_path / "outputs/run/global_step_5/merged"), 5)
    first = fingerprint(merged)
    same, other = Checkpoint(str(file.parent / "huggingface"), 5), Checkpoint("Qwen/Q", None)
    assert first == fingerprint(same) != fingerprint(other)
    file.write_bytes(b"a" * ((3 << 20) - 1) + b"b")
    assert fingerprint(merged) != first
    assert fingerprint(Checkpoint("Qwen/Qwen3-0.6B", None)) is None


def test_there_is_a_script_for_every_benchmark():
    scripts = {path.stem.removeprefix("eval-").replace("-", "") for path in (ROOT / "scripts").glob("eval-*.sh")}
    assert scripts == {*parts("evaluation"), "all"}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dry")
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text("{}")
    (folder / "model/model.safetensors").touch()
    row = {"problem": "1+1?", "answer": "2"}
    for name in ("math500", "aime24"):
        pd.DataFrame([row | {"problem": f"{name}, {i}"} for i in range(2)]).to_parquet(folder / f"{name}.parquet")
    (folder / "gaia.jsonl").write_text(json.dumps({"Question": "Who?", "Final answer": "Ann", "Level": 1}) + "\n")
    target = {"target": 5, "numbers": [2, 3]}
    countdown = {"data_source": "countdown", "prompt": [{"role": "user", "content": "2 3 = 5"}]}
    (folder / "countdown").mkdir()
    pd.DataFrame([countdown | {"reward_model": {"ground_truth": target}}]).to_parquet(folder / "countdown/test.parquet")
    return folder


@pytest.mark.parametrize(("script", "overrides", "plan"), table(__file__, "dry runs"))
def test_a_dry_run_tells_the_plan_and_starts_nothing(script, overrides, plan, inputs):
    env = {**os.environ, "DRY_RUN": "1", "HARDWARE": "cpu", "BENCHMARKS": "math500"}
    env |= {"DATA_DIR": f"{inputs}/countdown", "BRIGHTDATA_API_KEY": "none", "BRIGHTDATA_ZONE": "none"}
    options = [f"model={inputs}/model", *(override.format(inputs) for override in overrides)]
    (done,) = run_two_at_a_time([(["bash", script, "dry", *options], with_forks(env, [CPU]))])
    assert done.returncode == 0, done.stderr
    for part in [*plan, "nothing was started"]:
        assert part in done.stdout, done.stdout
    assert not (ROOT / "outputs/results/dry").exists()


@pytest.mark.parametrize(("script", "cpu", "gpu"), table(__file__, "profiles"))
def test_a_run_is_evaluated_with_the_profile_of_its_training(tmp_path, script, cpu, gpu):
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    (tmp_path / "recipe/tasks/search").mkdir(parents=True)
    shutil.copy(ROOT / "recipe/tasks/search/search_task.sh", tmp_path / "recipe/tasks/search")
    for device in ("cpu", "cuda"):
        config = tmp_path / f"outputs/on_{device}/global_step_5/config.yaml"
        config.parent.mkdir(parents=True)
        OmegaConf.save(composed("grpo_trainer", f"hardware={'gpu' if device == 'cuda' else 'cpu'}"), config)
    (python := tmp_path / "bin/python").parent.mkdir()
    python.write_text('#!/usr/bin/env bash\necho "HARDWARE=$HARDWARE $*"\n')
    python.chmod(0o755)
    env = {name: value for name, value in os.environ.items() if name not in ("HARDWARE", "DATA_DIR", "TOOLS")}
    env |= {"VIRTUAL_ENV": str(tmp_path), "PATH": f"{python.parent}:{os.environ['PATH']}"}

    def asked(experiment: str, **more: str) -> str:
        command = ["bash", f"scripts/eval-{script}.sh", experiment]
        return subprocess.run(command, cwd=tmp_path, env=env | more, capture_output=True, text=True, check=True).stdout

    for plan, hardware, parts_of_command in (
        (asked("on_cuda"), "gpu", gpu),
        (asked("by_name_gpu_seed0"), "gpu", gpu),
        (asked("on_cuda", HARDWARE="cpu"), "cpu", gpu),
        (asked("on_cpu"), "cpu", cpu),
        (asked("elsewhere"), "cpu", cpu),
        (asked("elsewhere", HARDWARE="gpu"), "gpu", gpu),
    ):
        assert all(part in plan for part in [f"HARDWARE={hardware}", *parts_of_command]), plan
