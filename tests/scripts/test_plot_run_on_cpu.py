"""Reads metrics, summarizes them and draws a picture with scripts/plot_run.py and run_metrics."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from recipe.common.reporting.run_curves import CURVES, plot_runs
from recipe.common.reporting.run_metrics import load_metrics, phase_seconds, validation_accuracy
from tests.scripts.loading import load_script
from tests.tables import table


def record(step: int, **data) -> str:
    return json.dumps({"step": step, "data": {key.replace("__", "/"): value for key, value in data.items()}})


def write_run(folder: Path, lines: list[str], name: str = "metrics.jsonl", end: str = "\n") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("\n".join(lines) + end)
    return folder


def a_run(n_steps: int = 20, scale: float = 1.0) -> list[str]:
    lines = []
    for step in range(1, n_steps + 1):
        data = {"critic/score/mean": scale * step / n_steps, "actor/entropy": 1 / step, "response_length/mean": 30.0}
        data |= {"actor/pg_clipfrac": 0.01, "timing_s/gen": 2.0, "timing_s/update_actor": 1.0}
        if step % 5 == 0:
            data |= {"val-core/countdown/acc/mean@8": step / 40, "timing_s/testing": 5.0}
        lines.append(json.dumps({"step": step, "data": data}))
    return lines


# ---- reading ----


def test_reads_values_steps_and_gaps(tmp_path):
    lines = [record(0, val__acc=0.5), record(2, a=3, flag=True), record(1, a=-1.5, text="no", vector=[1, 2], gone=None)]
    table = load_metrics(write_run(tmp_path, lines))
    assert list(table.index) == [0, 1, 2] and table.index.name == "step"
    assert set(table.columns) == {"val/acc", "a", "flag", "gone"}
    assert table.loc[1, "a"] == -1.5 and table.loc[2, "a"] == 3.0 and table.loc[2, "flag"] == 1.0
    assert math.isnan(table.loc[0, "a"]) and math.isnan(table.loc[1, "gone"])


def test_reads_what_verls_file_logger_writes(tmp_path, monkeypatch):
    from verl.utils.tracking import FileLogger

    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "metrics.jsonl"))
    logger = FileLogger("project", "experiment")
    logger.log({"actor/entropy": np.float32(0.5), "bad": float("nan"), "steps": np.int64(4)}, step=7)
    logger.finish()
    table = load_metrics(tmp_path)
    assert table.loc[7, "actor/entropy"] == 0.5 and table.loc[7, "steps"] == 4.0 and math.isnan(table.loc[7, "bad"])


def test_attempts_of_a_resumed_run_are_joined(tmp_path):
    write_run(tmp_path, [record(step, a=1.0) for step in range(6)], "metrics.001.jsonl")
    write_run(tmp_path, [record(3, val=0.5), record(4, a=2.0), '{"step": 5, "da'], "metrics.002.jsonl", end="")
    table = load_metrics(write_run(tmp_path, [record(5, a=3.0)]))
    assert table["a"].tolist() == [1.0, 1.0, 1.0, 1.0, 2.0, 3.0]
    assert table["val"].dropna().to_dict() == {3: 0.5}


def test_later_steps_of_an_abandoned_attempt_are_dropped(tmp_path):
    write_run(tmp_path, [record(step, a=1.0) for step in range(15)], "metrics.001.jsonl")
    table = load_metrics(write_run(tmp_path, [record(step, a=2.0) for step in (10, 11, 12)]))
    assert table["a"].to_dict() == dict.fromkeys(range(10), 1.0) | dict.fromkeys((10, 11, 12), 2.0)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([record(1, a=1.0), "{oops", record(2, a=1.0)], "line 2: not JSON"),
        (['{"step": "x", "data": {}}'], "line 1: expected an integer step and a mapping data"),
        (['{"step": 1, "data": 3}'], "line 1: expected an integer step and a mapping data"),
        ([""], "no metrics; expected lines like"),
    ],
)
def test_damaged_files_are_refused_by_name(tmp_path, lines, message):
    with pytest.raises(ValueError) as error:
        load_metrics(write_run(tmp_path, lines))
    assert message in str(error.value) and str(tmp_path) in str(error.value)


# ---- summaries ----


def test_phase_seconds_leave_out_the_warm_up_and_spread_rare_phases():
    gen = [100.0, 50.0, 2.0, 4.0, 3.0, 90.0, 2.5]  # steady: 2, 4, 3, 90, 2.5 -> median 3
    testing = [9.0, np.nan, np.nan, 10.0, np.nan, np.nan, 20.0]  # steady: 10 and 20 in 5 steps -> 15 * 2 / 5
    rows = pd.DataFrame({"timing_s/gen": [np.nan, *gen], "timing_s/testing": [np.nan, *testing]}, index=range(8))
    assert phase_seconds(rows) == pytest.approx({"gen": 3.0, "testing": 6.0})


def test_validation_accuracy_is_one_curve_per_data_source():
    rows = pd.DataFrame(
        {
            "val-core/openai/gsm8k/acc/mean@4": [0.25, np.nan, np.nan],
            "val-core/openai/gsm8k/acc/mean@16": [np.nan, np.nan, 0.75],
            "val-core/countdown/acc/mean@8": [0.1, np.nan, 0.2],
            "val-core/countdown/acc/best@8/mean": [0.9, 0.9, 0.9],
            "val-aux/countdown/reward/mean@8": [0.9, 0.9, 0.9],
        },
        index=[0, 1, 2],
    )
    curves = {name: values.to_dict() for name, values in validation_accuracy(rows).items()}
    assert curves == {"countdown": {0: 0.1, 2: 0.2}, "openai/gsm8k": {0: 0.25, 2: 0.75}}


# ---- pictures ----


def test_draws_runs_side_by_side(tmp_path, capsys):
    plot_run = load_script("plot_run")
    first, second = write_run(tmp_path / "grpo", a_run()), write_run(tmp_path / "hapo", a_run(30, 0.5))
    plot_run.main([str(first), str(second / "metrics.jsonl")])
    assert capsys.readouterr().out.strip() == str(first / "curves.png")
    assert (first / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in first.iterdir()) == ["curves.png", "metrics.jsonl"]


def texts_of(picture: Path) -> set[str]:
    """Return the texts of an SVG that matplotlib has drawn; it writes each as a comment beside its outline."""
    return set(re.findall(r"<!-- (.*?) -->", picture.read_text()))


@pytest.mark.parametrize(("values", "panels"), table(__file__, "panels"))
def test_panels_are_those_with_data(tmp_path, values, panels):
    metrics = load_metrics(write_run(tmp_path, [record(step, **values) for step in range(1, 4)]))
    shown = texts_of(plot_runs({"run": metrics}, tmp_path / "deep" / "c.svg"))
    titles = {*CURVES, "Validation accuracy: walk", "Time per phase"}
    assert shown & titles == panels and "run" in shown


def test_nothing_to_draw_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="warm: nothing to draw; expected metrics like critic/score/mean"):
        plot_runs({"warm": pd.DataFrame({"global_seqlen/mean": [1.0]})}, tmp_path / "c.png")


def test_labels(tmp_path):
    plot_run = load_script("plot_run")
    runs = [write_run(tmp_path / name, a_run(3)) for name in ("x/grpo", "y/grpo", "z/hapo")]
    assert plot_run.run_labels([runs[0], runs[2] / "metrics.jsonl"], None) == ["grpo", "hapo"]
    assert plot_run.run_labels(runs[:2], "A, B") == ["A", "B"]
    for names in (None, "a,b", "a,a,b"):
        with pytest.raises(ValueError, match="3 runs have the labels .*: give each its own"):
            plot_run.run_labels(runs, names)


@pytest.mark.parametrize(
    ("run", "message"), [("nowhere", "no such run folder or metrics file"), ("", "expected metrics.jsonl")]
)
def test_command_line_ends_in_one_line_on_a_missing_run(tmp_path, run, message):
    with pytest.raises(SystemExit) as error:
        load_script("plot_run").main([str(tmp_path / run)])
    assert error.value.code.startswith(f"plot_run: {tmp_path / run}: ") and message in error.value.code
