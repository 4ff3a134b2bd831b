"""The evaluator's numbers from answers given by hand, its command line and its plan; generation itself is vLLM's."""

import os
import runpy
import subprocess
from pathlib import Path

import pandas as pd
import pytest

from recipe.common.results import EvalResult, format_result_lines, parse_result_lines
from verl.trainer.checkpoint_marker import MARKER

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = runpy.run_path(str(ROOT / "scripts/evaluate.py"))
measure, score, find_checkpoint = SCRIPT["measure"], SCRIPT["score"], SCRIPT["find_checkpoint"]
parse_arguments, read_datasets = SCRIPT["parse_arguments"], SCRIPT["read_datasets"]


def row(truth, source: str = "math500") -> dict:
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": "?"}],
        "reward_model": {"style": "rule", "ground_truth": truth},
    }


COUNTDOWN = [row({"target": target, "numbers": [2, 3, 4]}, "countdown") for target in (14, 9)]


def sample(expression: str, length: int) -> tuple[str, int]:
    return f"<answer>{expression}</answer>", length


def boxed(*answers: str) -> list[tuple[str, int]]:
    return [(rf"so \boxed{{{answer}}}", 10) for answer in answers]


def test_countdown_mean_best_and_majority_by_hand():
    samples = [
        # two right, one that misses, one that breaks the rules: the right value wins the vote
        [sample("3*4+2", 5), sample("2+4*3", 5), sample("2+3+4", 7), sample("7+7", 3)],
        # one right, two that agree on 24: the vote goes wrong
        [sample("2+3+4", 5), sample("2*3*4", 5), sample("4*3*2", 5), ("no answer", 5)],
    ]
    found = measure(samples, score(samples, COUNTDOWN))
    assert found == {
        "Acc-Pass@1": pytest.approx((2 / 4 + 1 / 4) / 2),
        "Acc-Mean@4": pytest.approx((2 / 4 + 1 / 4) / 2),
        "Acc-Best@4": 1.0,
        "Acc-Maj@4": 0.5,
        "Response-Length-Mean": pytest.approx(5.0),
    }


def test_mathematics_mean_best_and_majority_by_hand():
    samples = [
        boxed(r"\frac{1}{2}", "3", r"\dfrac{1}{2}", "4"),  # the two spellings vote together
        boxed("7", "7", "8", "9"),  # the vote goes wrong
        [*boxed("1", "1"), ("no box", 10), ("no box", 10)],  # what has no answer does not vote
    ]
    found = measure(samples, score(samples, [row("0.5"), row("8"), row("1")]))
    assert found["Acc-Mean@4"] == pytest.approx((2 / 4 + 1 / 4 + 2 / 4) / 3)
    assert found["Acc-Best@4"] == 1.0
    assert found["Acc-Maj@4"] == pytest.approx(2 / 3)


def test_no_votes_is_a_wrong_vote():
    samples = [[("nothing", 1), ("nothing", 1)]]
    for problem in (COUNTDOWN[0], row("1")):
        found = measure(samples, score(samples, [problem]))
        assert found["Acc-Maj@2"] == found["Acc-Best@2"] == 0.0


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


def test_the_task_sets_defaults_and_options_override_them():
    args = parse_arguments(["run", "--task", "math", "--top-p", "0.7", "--data", "a.parquet", "b.parquet"])
    assert (args.temperature, args.top_p, args.top_k, args.n) == (0.6, 0.7, 20, 8)
    assert args.data == ["a.parquet", "b.parquet"]
    args = parse_arguments(["--step", "3", "run", "--task", "countdown"])
    assert (args.experiment, args.step, args.temperature, args.top_p, args.top_k) == ("run", 3, 1.0, 1.0, -1)


@pytest.mark.parametrize(
    ("option", "value"), [("--n", "0"), ("--top-p", "0"), ("--temperature", "0"), ("--tensor-parallel", "0")]
)
def test_bad_options_are_named(option, value, capsys):
    with pytest.raises(SystemExit):
        parse_arguments(["run", "--task", "math", option, value])
    assert option in capsys.readouterr().err


@pytest.fixture
def files(tmp_path) -> dict[str, str]:
    tables = {
        "math500": [row("1"), row("2")],
        "amc23": [row("3", "amc23")],
        "mixed": [row("4", "x"), row("5", "y")],
        "again": [row("6", "amc23")],
        "holes": [row("7"), row(None)],
    }
    for name, rows in tables.items():
        pd.DataFrame(rows).to_parquet(tmp_path / f"{name}.parquet")
    return {name: str(tmp_path / f"{name}.parquet") for name in tables}


def test_data_sets_are_named_by_their_source_or_file(files):
    sets = read_datasets([files["math500"], files["amc23"], files["mixed"]], "math")
    assert {name: len(rows) for name, rows in sets.items()} == {"math500": 2, "amc23": 1, "mixed": 2}


def test_bad_data_are_named(files):
    with pytest.raises(SystemExit, match="again.parquet.* named amc23 too"):
        read_datasets([files["amc23"], files["again"]], "math")
    with pytest.raises(SystemExit, match="holes.parquet: row 1"):
        read_datasets([files["holes"]], "math")
    with pytest.raises(SystemExit, match="missing.parquet does not exist .*recipe.common.math_data"):
        read_datasets(["missing.parquet"], "math")


def test_a_log_holds_the_results_of_several_data_sets():
    results = [
        EvalResult(experiment="run", step=5, dataset=name, n_samples=2, n_questions=3, metrics={"Acc-Pass@1": value})
        for name, value in (("math500", 0.5), ("amc23", 0.25))
    ]
    assert parse_result_lines(["model: m", *format_result_lines(results)]) == results


@pytest.mark.parametrize(
    ("script", "sampling"),
    [
        ("scripts/eval-countdown.sh", "n=8, temperature=1.0, top_p=1.0, top_k=-1"),
        ("scripts/eval-math.sh", "n=8, temperature=0.6, top_p=0.95, top_k=20"),
        ("recipe/hapo/eval.sh", "n=8, temperature=0.5, top_p=0.7, top_k=-1"),
    ],
)
def test_a_dry_run_tells_the_plan_and_starts_nothing(script, sampling, files, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    data = [files["math500"], files["amc23"]]
    options = ["--model", str(tmp_path / "model")]
    env = {**os.environ, "DRY_RUN": "1", "HARDWARE": "cpu", "DATA": " ".join(data), "PYTHONPATH": str(ROOT)}
    if "hapo" not in script:
        options += ["--data", *data]
    done = subprocess.run(
        ["bash", script, "dry", *options], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert sampling in done.stdout and "nothing was started" in done.stdout
    assert "math500" in done.stdout and "2 questions x 8 = 16 responses, scored by math_equivalence" in done.stdout
    assert not (ROOT / "outputs/results/dry.log").exists()
