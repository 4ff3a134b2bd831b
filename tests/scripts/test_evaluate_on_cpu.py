"""The evaluation scripts' plans, checkpoints and numbers by hand; with servers: tests/recipe/common, tests/e2e."""

import json
import os
from pathlib import Path

import pandas as pd
import pytest

from tests.forked import CPU, run_two_at_a_time, with_forks
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
        (r"<think>x</think> <result>\boxed{7}</result>", "7", 1.0),  # of the model itself
        (r"<search>q</search> <result>cut off \boxed{7}", "7", 0.0),
    ],
)
@pytest.mark.parametrize("scoring", ["math", "qa"])
def test_what_a_tool_says_is_no_answer(scoring, response, truth, score):
    assert find_scoring(scoring).score(Question("1", "?", [], [truth]), response).score == score


def test_what_a_run_trains_on_is_not_evaluated(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "outputs/data/math"
    folder.mkdir(parents=True)
    trained = pd.DataFrame([{"data_source": "x", "prompt": "p", "reward_model": "r"}])
    for name in ("dapo-math-17k", "valid", "test", "math"):
        trained.to_parquet(folder / f"{name}.parquet")
    pd.DataFrame([{"messages": ["p", "1"]}]).to_parquet(folder / "sft.parquet")
    pd.DataFrame([{"problem": "p", "answer": "1"}]).to_parquet(folder / "of_the_hub.parquet")
    found = [Path(file).stem for file in _files_under_outputs("math")]
    assert found == ["math", "of_the_hub", "test"]


def test_an_experiment_without_complete_checkpoint_is_an_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs/run/global_step_5/actor").mkdir(parents=True)
    with pytest.raises(SystemExit, match="no complete checkpoint"):
        find_checkpoint("run", None)


def test_shards_are_to_be_merged_unless_the_trainer_saved_a_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for step in (5, 10):
        actor = tmp_path / f"outputs/run/global_step_{step}/actor"
        (actor / "huggingface").mkdir(parents=True)
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
    assert (
        first == fingerprint(Checkpoint(str(file.parent / "huggingface"), 5)) != fingerprint(Checkpoint("Qwen/Q", None))
    )
    file.write_bytes(b"a" * ((3 << 20) - 1) + b"b")
    assert fingerprint(merged) != first
    assert fingerprint(Checkpoint("Qwen/Qwen3-0.6B", None)) is None


def test_there_is_a_script_for_every_benchmark():
    scripts = {path.stem.removeprefix("eval-") for path in (ROOT / "scripts").glob("eval-*.sh")}
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


@pytest.mark.parametrize(
    ("script", "overrides", "told"),
    [
        ("scripts/eval-countdown.sh", [], ["1 questions x 8", "temperature=1.0, top_p=1.0, top_k=-1, max_tokens=12"]),
        ("scripts/eval-countdown.sh", [], ["data_parallel=1, tensor_parallel=1 on the CPU, 256 requests at once"]),
        ("scripts/eval-math.sh", ["files=[{}/math500.parquet]"], ["2 questions x 8 = 16", "0.6, top_p=0.95, top_k=20"]),
        ("recipe/hapo/eval.sh", ["files=[{}/math500.parquet]"], ["temperature=0.5, top_p=0.7, top_k=-1"]),
        ("scripts/eval-aime24.sh", ["files=[{}/aime24.parquet]", "n=2"], ["AIME", "2 questions x 2 = 4"]),
        (
            "scripts/eval-gaia.sh",
            ["files=[{}/gaia.jsonl]", "scoring=qa"],
            ["GAIA", "exact match", "tools: python, search, 6 calls a response"],
        ),
    ],
)
def test_a_dry_run_tells_the_plan_and_starts_nothing(script, overrides, told, inputs):
    env = {**os.environ, "DRY_RUN": "1", "HARDWARE": "cpu", "BENCHMARKS": "math500"}
    env |= {"DATA_DIR": f"{inputs}/countdown", "BRIGHTDATA_API_KEY": "none", "BRIGHTDATA_ZONE": "none"}
    options = [f"model={inputs}/model", *(override.format(inputs) for override in overrides)]
    (done,) = run_two_at_a_time([(["bash", script, "dry", *options], with_forks(env, [CPU]))])
    assert done.returncode == 0, done.stderr
    for part in [*told, "nothing was started"]:
        assert part in done.stdout, done.stdout
    assert not (ROOT / "outputs/results/dry").exists()
