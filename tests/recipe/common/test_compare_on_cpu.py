"""The comparisons of methods, on made-up runs that are computed by hand; no run is made."""

import signal
import subprocess
import sys
import time
from argparse import Namespace
from statistics import NormalDist
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from omegaconf import OmegaConf

from benchmarks.report import t_quantile
from recipe.common import compare, compare_runs
from recipe.common.compare import (
    Comparison,
    Key,
    axes_of,
    best_rates,
    differences,
    draw,
    nominal_levels,
    row_of,
    still_in,
    with_interval,
)
from recipe.common.compare_runs import area, command_of, curve_of, in_parallel, overrides_of
from recipe.common.component import TokenBudget


def run(accuracies: list[float], tokens: float, seconds: float, calls: float | None = None) -> pd.DataFrame:
    """Return metrics of a run with a validation every two steps; `tokens` and `calls` of each of 4 prompts in a step,
    `seconds` of a step."""
    steps = range(2 * len(accuracies) - 1)
    table = pd.DataFrame(index=pd.Index(steps, name="step"))
    trained = pd.Series([np.nan, *[1.0] * (len(steps) - 1)], index=table.index)  # step 0 only validates
    validated = pd.Series(accuracies, index=steps[::2])
    table["val-core/walk/acc/mean@8"] = validated
    table["tree/tokens_generated"], table["tree/prompts"] = tokens * trained, 4 * trained
    table["timing_s/testing"] = pd.Series(10.0, index=validated.index[1:])  # upstream's step ends before it
    table["timing_s/step"] = seconds * trained
    if calls is not None:
        table["tree/tool_calls"] = calls * trained
    return table


# ---- curves and the simple comparison ----


def test_a_curve_counts_what_was_spent_before_each_validation():
    curve = curve_of(run([0.1, 0.2, 0.4], tokens=50, seconds=3, calls=2))
    assert curve["steps"].tolist() == [0, 2, 4] and curve["accuracy"].tolist() == [0.1, 0.2, 0.4]
    assert curve["tokens"].tolist() == [0, 2 * 4 * 50, 4 * 4 * 50]
    assert curve["seconds"].tolist() == [0, 6, 12], "without validation"
    assert curve["calls"].tolist() == [0, 16, 32]


def test_a_run_whose_validations_lost_prompts_is_named(monkeypatch, capsys, tmp_path):
    table = run([0.1, 0.2, 0.4], tokens=50, seconds=3)
    monkeypatch.setattr(compare_runs, "ROOT", tmp_path)
    monkeypatch.setattr(compare_runs, "load_metrics", lambda folder: table)
    compare_runs.trained("made_before", [], {}, lambda curve: True)
    table["val-aux/failed_prompts"] = pd.Series([3.0, 2.0], index=[0, 4])
    compare_runs.trained("made_before", [], {}, lambda curve: True)
    assert capsys.readouterr().err == "warning: made_before: its validations lost 5 prompts: train.log says why\n"


def test_a_run_of_another_design_is_not_reported(monkeypatch, tmp_path):
    monkeypatch.setattr(compare_runs, "ROOT", tmp_path)
    monkeypatch.setattr(compare_runs, "load_metrics", lambda folder: run([0.1, 0.2, 0.4], tokens=50, seconds=3))
    runs_of_two_tasks = [
        ("made_before", ["run.sh"], compare_runs.environment_of("grpo", name), bool) for name in ("walk", "code")
    ]
    compare_runs.trained(*runs_of_two_tasks[0][:3], lambda curve: True)
    for arguments, hops in ((runs_of_two_tasks[1], ""), (runs_of_two_tasks[0], "3")):
        monkeypatch.setenv("HOPS", hops)
        with pytest.raises(ValueError, match=f"{'HOPS' if hops else 'TASK'} differ.*choose another --name"):
            compare_runs.trained(*arguments)


def test_prompts_that_were_not_kept_are_paid_for():
    table = run([0.1, 0.2], tokens=50, seconds=3)
    table["training/filter_groups/gen_batches"] = 1.5
    assert curve_of(table)["tokens"].tolist() == [0, 2 * 4 * 50 * 1.5]
    table = table.drop(columns="training/filter_groups/gen_batches")  # upstream's buffer, of 4 prompts a step
    table["training/filter_groups/evicted_samples"] = [np.nan, 3, np.nan]
    table["training/filter_groups/discarded_surplus_samples"] = [np.nan, 1, 2]
    assert curve_of(table)["tokens"].tolist() == [0, (4 + 3 + 1) * 50 + (4 + 2) * 50]
    table["hato/trees_dropped"] = [np.nan, 3, 2]  # its tokens_generated is of these trees too
    assert curve_of(table)["tokens"].tolist() == [0, 2 * 4 * 50]


def test_runs_are_compared_where_the_shorter_of_two_ends(tmp_path):
    ours = {0: curve_of(run([0.1, 0.3, 0.5], tokens=100, seconds=1))}
    theirs = {0: curve_of(run([0.1, 0.2, 0.3], tokens=50, seconds=1))}
    curves = {"ours": ours, "theirs": theirs}
    assert axes_of(curves) == ["steps", "tokens", "seconds"], "there were no calls"
    row = row_of("ours", curves, "theirs")
    # at 4 steps 0.5 against 0.3; at the 800 tokens of theirs 0.3 against 0.3; straight lines from 0.1 in both
    assert row[-6:-4] == ["+0.200", "+0.100"] and [abs(float(cell)) for cell in row[-4:-2]] == [0, 0]
    assert with_interval([1.0, 2.0, 3.0], ".3f") == "2.000 ± 2.484"  # 4.303 / sqrt(3)
    draw(curves, {"ours": (0.1, 0.05)}, "theirs", tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_the_area_is_the_mean_over_the_budget():
    curve = pd.DataFrame({"accuracy": [0.0, 0.2, 0.2], "tokens": [0, 100, 300]})
    assert area(curve, "tokens", 200) == pytest.approx((0.1 * 100 + 0.2 * 100) / 200)
    assert area(curve, "tokens", 100) == pytest.approx(0.1)
    assert area(curve, "tokens", 50) == pytest.approx(0.05), "the line to a validation behind the end"


def test_a_method_is_a_name_of_parts_or_a_list_of_overrides():
    assert overrides_of("tree_grpo") == ["tree=tree_grpo", "credit=tree_grpo"], "the parts of this name"
    assert overrides_of("mine: tree=eptree 'data.seed=1'") == ["tree=eptree", "data.seed=1"]
    assert command_of("hapo", 10, "walk") == ["recipe/hapo/run_countdown_cpu.sh"]
    assert command_of("mine: recipe/hapo/run_smollm2_cpu.sh", 10, "word_problems") == ["recipe/hapo/run_smollm2_cpu.sh"]
    # its script knows no tools
    assert command_of("hapo", 10, "search_task") == [*command_of("arpo", 10, "search_task"), "credit=hapo", "loss=hapo"]
    assert command_of("grpo", 10, "search_task") == [*command_of("arpo", 10, "search_task"), "credit=grpo"]
    assert command_of("grpo", 10, "countdown")[0] == "recipe/common/run_explore.sh"
    schedule = "actor_rollout_ref.rollout.kt.mix_ratio_schedule"
    shares = f"+{schedule}={{0: 1.0, 1: 0.75, 2: 0.5, 8: 0.25, 20: 0.0}}"
    assert command_of("latr", 50, "countdown") == ["recipe/latr/run_countdown_cpu.sh", f"~{schedule}", shares]
    assert command_of("latr", 50, "word_problems")[1:] == ["tree=latr", shares]
    with pytest.raises(ValueError, match="there is no method hapoo: choose one of grpo, "):
        overrides_of("hapoo")


# ---- runs ----


def test_a_run_that_fails_ends_those_to_come():
    started = []

    def fails(seed: int):
        started.append(seed)
        time.sleep(0.05)
        raise RuntimeError(f"seed {seed} failed")

    with pytest.raises(RuntimeError, match="seed 0 failed"):
        in_parallel(range(20), fails, 1, print)
    assert len(started) < 20


STOPPED = """
import sys
from pathlib import Path
from recipe.common import compare_runs
compare_runs.ROOT = Path(sys.argv[1])
work = lambda seed: compare_runs.trained("a", ["run.sh"], {"SEED": str(seed)}, bool)
compare_runs.in_parallel([0, 1, 2], work, 1, print)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_run_and_begins_no_other(number, tmp_path):
    (tmp_path / "run.sh").write_text('trap "echo ended $SEED; exit 1" TERM\necho began $SEED\nsleep 60 & wait\n')
    tool = subprocess.Popen([sys.executable, "-c", STOPPED, str(tmp_path)])
    log = tmp_path / "outputs/a/script.log"
    deadline = time.monotonic() + 60
    while not (log.exists() and "began 0" in log.read_text()) and time.monotonic() < deadline:
        time.sleep(0.1)
    for _ in range(20):  # the first may come to a whole process group, and be handed on by its parent too
        tool.send_signal(number)
    assert tool.wait(20) == 128 + number
    assert log.read_text().split("\n") == ["began 0", "ended 0", ""]


def test_a_run_ends_with_its_tokens_and_is_validated_at_equal_distances():
    config = OmegaConf.create(
        {"trainer": {"token_budget": {"tokens": 1000, "validations": 2}, "test_freq": 20, "save_freq": 30}}
    )
    assert TokenBudget.is_needed(config)
    assert not TokenBudget.is_needed(
        OmegaConf.create({"trainer": {"token_budget": {"tokens": None, "validations": 2}}})
    )
    budget, trainer = TokenBudget(config), SimpleNamespace(config=config, global_steps=1, total_training_steps=50)
    validated, saved = [], []
    while trainer.global_steps <= trainer.total_training_steps:
        with budget.around_update(trainer, {"tree/tokens_generated": 100.0, "tree/prompts": 3, "timing_s/gen": 1.0}):
            pass
        if trainer.global_steps % config.trainer.test_freq == 0:
            validated.append(trainer.global_steps)
        if trainer.global_steps % config.trainer.save_freq == 0:
            saved.append(trainer.global_steps)
        trainer.global_steps += 1
    assert validated == [2, 4] and saved == [4] and trainer.total_training_steps == 4
    resumed = TokenBudget(config)
    again = SimpleNamespace(global_steps=9, total_training_steps=50)
    resumed.load_state_dict(budget.state_dict())
    resumed.on_resume(again)
    assert again.total_training_steps == 9, "the same command trains no further"
    assert resumed.spent == 1200


# ---- the sequential comparison ----


def test_levels_are_the_published_ones():
    """The boundaries of five looks at 5 %, from Lan and DeMets's program and gsDesign's sfLDOF."""
    bounds = [-NormalDist().inv_cdf(level / 2) for level in nominal_levels(5, 0.05)]
    assert bounds == pytest.approx([4.8769, 3.3569, 2.6803, 2.2898, 2.0310], abs=1e-3)
    assert t_quantile(0.05, 1) == pytest.approx(12.7062, abs=1e-4) and t_quantile(0.001, 9) == pytest.approx(
        4.7809, abs=1e-4
    )


@pytest.mark.parametrize("looks", [5, 10])
def test_without_a_difference_one_in_twenty_is_found_at_most(looks):
    draws, rejected = np.random.default_rng(0).normal(size=(100_000, looks)), np.zeros(100_000, dtype=bool)
    for n, level in list(enumerate(nominal_levels(looks), start=1))[1:]:
        half = t_quantile(level, n - 1) * draws[:, :n].std(1, ddof=1) / n**0.5
        rejected |= np.abs(draws[:, :n].mean(1)) > half
    assert 0.044 < rejected.mean() <= 0.05


def rows_of(areas: dict[tuple, list[float | None]]) -> pd.DataFrame:
    """Return rows of (stage, method, rate) -> area by seed."""
    return pd.DataFrame(
        [
            {"stage": stage, "method": method, "rate": rate, "seed": seed, "area": value}
            for (stage, method, rate), values in areas.items()
            for seed, value in enumerate(values)
        ]
    )


def test_the_best_rate_has_the_largest_mean_area_and_no_failed_run():
    areas = {("rates", "grpo", "1e-4"): [0.2, 0.2], ("rates", "grpo", "2e-4"): [0.1, 0.4]}
    areas |= {("rates", "grpo", "4e-4"): [0.9, None], ("rates", "latr", "1e-4"): [0.3, 0.1]}
    areas |= {("rates", "latr", "2e-4"): [0.1, 0.1], ("seeds", "latr", "2e-4"): [0.9, 0.9]}
    assert best_rates(rows_of(areas)) == {"grpo": "2e-4", "latr": "1e-4"}
    areas |= {("rates", "dapo", "1e-4"): [0.1, None]}
    assert best_rates(rows_of(areas)) == {"grpo": "2e-4", "latr": "1e-4"}


def test_a_method_leaves_when_its_difference_is_known():
    base = np.array([0.10, 0.12, 0.08, 0.11, 0.09, 0.10])
    noise = np.array([0.01, -0.01, 0.02, -0.02, 0.01, -0.01])
    areas = {"grpo": base, "better": base + 0.2 + noise, "equal": base + noise / 20, "unsure": base + 4 * noise}
    areas["broken"] = np.array([0.1, np.nan, 0.1, 0.1, 0.1, 0.1])
    rows = rows_of({("seeds", name, "1e-4"): [*values] for name, values in areas.items()})
    results = differences(rows, list(areas), looks=10)
    assert list(results) == ["better", "equal", "unsure"] and results["better"][0] == pytest.approx(0.2)
    assert still_in(results, half_width=0.02) == ["unsure"]
    first = differences(rows[rows["seed"] == 0], list(areas), looks=10)
    assert still_in(first, half_width=0.02) == list(areas)[1:], "one pair has no interval"
    with pytest.raises(ValueError, match="a run of broken has failed"):
        differences(rows, ["broken", "grpo"], looks=10)


@pytest.fixture
def trained_runs(monkeypatch):
    """Let runs be made up; returns the list of their experiments. `slow` is worse than GRPO, and a rate of it fails."""
    made = []

    def trained(experiment, command, environment, is_complete):
        made.append(experiment)
        rate, seed, slow = command[-1].rpartition("=")[2], int(environment["SEED"]), "data.seed=1" in command
        if slow and rate == "4e-4":
            raise RuntimeError("the run failed")
        end = {"1e-4": 0.2, "4e-4": 0.4}.get(rate, 0.3) + 0.01 * (seed % 3) - 0.1 * slow
        curve = curve_of(run([0.0, end, end], tokens=100 + seed % 2, seconds=1))
        assert is_complete(curve)
        return curve

    monkeypatch.setattr(compare, "trained", trained)
    return made


def test_every_seed_of_a_comparison_by_steps_is_run(tmp_path, monkeypatch, trained_runs, capsys):
    options = ["--methods", "grpo", "slow: data.seed=1", "--steps", "4", "--output", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["compare.py", *options])
    compare.main()
    assert set(trained_runs) == {f"compare_seeds_{name}_{seed}" for name in ("grpo", "slow") for seed in range(3)}
    assert "| slow | 3 | 0.210 ± 0.025 | 4 | " in (tmp_path / "compare.md").read_text()
    rows = pd.read_csv(tmp_path / "compare.csv")
    rows["curve"] = rows["curve"].where(rows["method"] != "slow", rows["curve"].str.replace("[0.0", "[0.1"))
    rows.to_csv(tmp_path / "compare.csv", index=False)
    with pytest.raises(SystemExit):
        compare.main()
    error = capsys.readouterr().err
    assert "with seed 0, " in error and "not the same warm start or machine; use another --name" in error


def test_a_comparison_goes_on_where_it_was_stopped(tmp_path, monkeypatch, trained_runs, capsys):
    seeds = ",".join(map(str, range(10)))
    options = ["--methods", "grpo", "slow: data.seed=1", "--tokens", "1600", "--rates", "1e-4,4e-4", "--seeds", seeds]
    options += ["--jobs", "1", "--output", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["compare.py", *options])
    compare.main()
    rows = pd.read_csv(tmp_path / "compare.csv", dtype={"rate": str})
    assert len(rows) == len(trained_runs) and rows["area"].isna().sum() == 2
    seeds = rows[rows["stage"] == "seeds"]
    assert seeds.groupby("method")["rate"].unique().map(list).to_dict() == {"grpo": ["4e-4"], "slow": ["1e-4"]}
    assert 3 <= seeds["seed"].nunique() < 10, "it is decided before the last seed"
    page = (tmp_path / "compare.md").read_text()
    assert "| slow | 1e-4 | -" in page and "| worse |" in page
    assert (tmp_path / "compare.png").exists()

    rows.iloc[:-1].to_csv(tmp_path / "compare.csv", index=False)  # the table after the last run was killed
    trained_runs.clear()
    compare.main()
    assert len(trained_runs) == 1 and len(pd.read_csv(tmp_path / "compare.csv")) == len(rows)
    monkeypatch.setattr("sys.argv", ["compare.py", *options, "--validations", "4"])
    with pytest.raises(SystemExit):
        compare.main()
    assert "another design (validations differ): choose another --name" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["compare.py", *options, "--name", "other", "--least-gain", "0.5"])
    with pytest.raises(SystemExit):
        compare.main()
    assert "above its start at its best rate, less than --least-gain" in capsys.readouterr().err


def test_the_plan_counts_what_is_left(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("subprocess.run", lambda *args, **options: None)  # the dry run of each method
    args = {"name": "a", "output": str(tmp_path), "methods": ["grpo", "passk"], "rates": "1e-4,2e-4", "task": "walk"}
    args |= {"tokens": 9, "validations": 8, "steps": 60, "overrides": [], "seeds": [*range(10)], "seconds": 360}
    comparison = Comparison(Namespace(**args, jobs=2))
    comparison.print_plan()
    runs = "runs for the rates, then at most 20 for the seeds, 2 at a time"
    assert f"plan: 8 {runs}, 360 s each: 0.4 h for the rates, at most 1.4 h in all" in capsys.readouterr().out
    comparison.add({**Key("rates", "grpo", "1e-4", 100)._asdict(), "task": "walk", "area": 0.1, "seconds": 720})
    Comparison(Namespace(**args, jobs=2)).print_plan()
    assert f"plan: 7 {runs}, 720 s each" in capsys.readouterr().out
