"""The comparison of methods at equal steps, tokens, seconds and calls, on made-up runs that are computed by hand."""

import subprocess
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from studies.method_runs import (
    at,
    axes_of,
    check_lengths,
    command_of,
    curve_of,
    draw,
    main,
    overrides_of,
    read_curves,
    row_of,
    trained_curves,
    with_interval,
    write_curves,
)


def run(accuracies: list[float], tokens: float, seconds: float, calls: float | None = None) -> pd.DataFrame:
    """Of a validation every two steps, of 10 s each; `tokens` and `calls` of each of 4 prompts in a step."""
    steps = range(2 * len(accuracies) - 1)
    table = pd.DataFrame(index=pd.Index(steps, name="step"))
    trained = pd.Series([np.nan, *[1.0] * (len(steps) - 1)], index=table.index)  # step 0 only validates
    validated = pd.Series(accuracies, index=steps[::2])
    table["val-core/walk/acc/mean@8"] = validated
    table["val-core/walk/acc/best@8/mean"] = 2 * validated
    table["actor/entropy"] = 0.5 * trained
    table["tree/tokens_generated"], table["tree/prompts"] = tokens * trained, 4 * trained
    table["timing_s/testing"] = pd.Series(10.0, index=validated.index[1:])  # upstream's step ends before it
    table["timing_s/step"] = seconds * trained
    if calls is not None:
        table["tree/tool_calls"] = calls * trained
    return table


def test_a_curve_counts_what_was_spent_before_each_validation():
    curve = curve_of(run([0.1, 0.2, 0.4], tokens=50, seconds=3, calls=2))
    assert curve["steps"].tolist() == [0, 2, 4] and curve["accuracy"].tolist() == [0.1, 0.2, 0.4]
    assert curve["tokens"].tolist() == [0, 2 * 4 * 50, 4 * 4 * 50]
    assert curve["seconds"].tolist() == [0, 6, 12], "without validation"
    assert curve["calls"].tolist() == [0, 16, 32]


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


def test_runs_are_compared_where_the_shorter_of_two_ends():
    ours = {0: curve_of(run([0.1, 0.3, 0.5], tokens=100, seconds=1))}
    theirs = {0: curve_of(run([0.1, 0.2, 0.3], tokens=50, seconds=1))}
    assert axes_of({"ours": ours, "theirs": theirs}) == ["steps", "tokens", "seconds"], "there were no calls"
    assert at(ours[0], "tokens", 400) == pytest.approx(0.2), "half of the way to step 2"
    row = row_of("ours", ours, theirs, ["steps", "tokens"])
    # at 4 steps 0.5 against 0.3; at the 800 tokens of theirs 0.3 against 0.3; straight lines from 0.1 in both
    assert row[-4:-2] == ["+0.200", "+0.100"] and row[-2] == "+0.000" and float(row[-1]) == pytest.approx(0, abs=1e-9)


def test_curves_are_kept_for_those_who_go_on(tmp_path):
    path = tmp_path / "runs.csv"
    assert read_curves(path) == {}
    curves = {
        ("grpo", "", 0): curve_of(run([0.1, 0.25], tokens=50, seconds=3)),
        ("latr", "1e-4", 0): curve_of(run([0.1, 0.5], tokens=1e6, seconds=3)),
    }
    write_curves(path, curves)
    kept = read_curves(path)
    assert list(kept) == list(curves)
    for key, curve in curves.items():
        pd.testing.assert_frame_equal(kept[key], curve.reset_index(drop=True), check_dtype=False)


def test_runs_of_different_warm_starts_are_not_paired(tmp_path):
    curves = {("grpo", "", 0): curve_of(run([0.1, 0.2], 50, 3)), ("latr", "", 0): curve_of(run([0.2, 0.3], 50, 3))}
    with pytest.raises(ValueError, match="with seed 0, grpo begins at an accuracy of 0.1000 and latr at 0.2000"):
        write_curves(tmp_path / "runs.csv", curves)
    assert not (tmp_path / "runs.csv").exists()
    curves["latr", "", 1] = curves.pop(("latr", "", 0))
    write_curves(tmp_path / "runs.csv", curves)


def test_runs_of_different_lengths_are_not_in_one_table():
    curves = {("grpo", "", 0): curve_of(run([0.1, 0.2], 50, 3)), ("latr", "", 0): curve_of(run([0.1, 0.2, 0.3], 50, 3))}
    with pytest.raises(ValueError, match="runs.csv: latr with seed 0 has 4 steps, not 2: use another --name"):
        check_lengths(Path("runs.csv"), curves, 2)


def test_a_method_is_a_name_of_parts_or_a_list_of_overrides():
    assert overrides_of("tree_grpo") == ["tree=tree_grpo", "credit=tree_grpo"], "the parts of this name"
    assert overrides_of("mine: tree=eptree 'data.seed=1'") == ["tree=eptree", "data.seed=1"]
    assert command_of("hapo", 10, "walk") == ["recipe/hapo/run_countdown_cpu.sh"]
    assert command_of("hapo", 10, "word_problems") == ["recipe/hapo/run_smollm2_cpu.sh"]
    # its script knows no tools
    assert command_of("hapo", 10, "search_task") == [*command_of("arpo", 10, "search_task"), "credit=hapo", "loss=hapo"]
    assert command_of("grpo", 10, "countdown")[0] == "recipe/common/run_explore.sh"
    with pytest.raises(ValueError, match="there is no method hapoo: choose one of grpo, "):
        overrides_of("hapoo")


def test_a_run_that_fails_names_its_log_and_ends_those_to_come(tmp_path, monkeypatch):
    started = []

    def fails(experiment, method, seed, steps, command, output=None, **environment):
        started.append(experiment)
        time.sleep(0.1)
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr("studies.method_runs.ROOT", tmp_path)
    monkeypatch.setattr("studies.method_runs.trained", fails)
    wanted = [("tree_grpo", "", seed) for seed in range(20)]
    with pytest.raises(RuntimeError, match=r"tree_grpo with seed 0 failed: .*/outputs/a_tree_grpo_5steps_seed0.log"):
        trained_curves(wanted, "a", "walk", 5, [], jobs=1)
    assert len(started) < 20


def test_runs_in_bypass_mode_have_no_entropy(tmp_path):
    bypassing = {seed: curve_of(run([0.1, 0.2 + seed / 10], 50, 3).drop(columns="actor/entropy")) for seed in (0, 1)}
    baseline = {seed: curve_of(run([0.1, 0.2], 50, 3)) for seed in (0, 1)}
    row = row_of("bypassing", bypassing, baseline, ["steps"])
    assert row[:2] == ["bypassing", "2"] and row[5] == "" and "nan" not in " ".join(row)
    assert row_of("grpo", baseline, baseline, ["steps"])[5] == "0.500 ± 0.000"
    assert with_interval([1.0, 2.0, 3.0], ".3f") == "2.000 ± 2.484"  # 4.303 / sqrt(3)
    draw({"bypassing": bypassing, "grpo": baseline}, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000


@pytest.mark.parametrize(("seeds", "style"), [(2, "one seed"), (4, "95 % interval of the mean")])
def test_the_picture_explains_its_lines_and_shows_single_points(tmp_path, monkeypatch, seeds, style):
    curves = {seed: curve_of(run([0.1, 0.2 + seed / 10], 50, 3)) for seed in range(seeds)}
    figures = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *args, **options: figures.append(figure))
    monkeypatch.setattr("studies.method_runs.replacing", lambda path: nullcontext(path))
    draw({"grpo": curves}, tmp_path / "curves.png")
    (legend,) = figures[0].legends
    assert [text.get_text() for text in legend.get_texts()] == ["grpo", "mean; dot: validation", style]
    entropy = figures[0].axes[-1]  # there is one value, at the end
    assert [line.get_marker() for line in entropy.get_lines() if len(set(line.get_xdata())) == 1].count("o") == 1


def test_differences_are_to_the_baseline_at_its_best_rate(tmp_path, monkeypatch):
    """Of runs that the .csv has, so that none is made."""
    ends = {("grpo", "1e-4"): 0.2, ("grpo", "2e-4"): 0.3, ("latr", "1e-4"): 0.4}
    runs = {(*key, seed): curve_of(run([0.1, end], 50, 3)) for key, end in ends.items() for seed in (0, 1)}
    write_curves(tmp_path / "tuned.csv", runs)
    monkeypatch.setattr("studies.method_runs.RESULTS", tmp_path)
    monkeypatch.setattr("benchmarks.report.RESULTS", tmp_path)
    options = ["--methods", "grpo,latr", "--rates", "grpo=1e-4,2e-4 latr=1e-4", "--steps", "2", "--seeds", "0,1"]
    monkeypatch.setattr("sys.argv", ["method_runs.py", "--name", "tuned", *options])
    main()
    page = (tmp_path / "tuned.md").read_text()
    assert "differences of accuracy to grpo 2e-4," in page
    header = "| method | accuracy at the end | final at equal steps | final at equal generated tokens | 1,000 tokens |"
    assert header in page.splitlines()
    final = {line.split(" | ")[0]: line.split(" | ")[2] for line in page.splitlines() if line.startswith("| ")}
    assert final["| grpo 1e-4"] == "-0.100 ± 0.000" and final["| latr 1e-4"] == "+0.100 ± 0.000"
    table = pd.read_csv(tmp_path / "tuned_table.csv", index_col="method")
    assert table.loc["latr 1e-4", "mean at equal steps"] == "+0.050 ± 0.000" and table.shape == (3, 13)
    monkeypatch.setattr("sys.argv", ["method_runs.py", "--methods", "latr", "--name", "tuned"])
    with pytest.raises(SystemExit):
        main()
