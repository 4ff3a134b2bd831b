"""scripts/read_log.py and verl.evaluation.scores.results: result lines round-trip, the CSV holds the logs' numbers."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.scripts.loading import load_script
from verl.evaluation.scores.results import EvalResult, format_result_lines, parse_result_lines, write_result_log

RESULT = EvalResult(
    experiment="hapo",
    step=200,
    dataset="countdown",
    n_samples=8,
    n_questions=64,
    metrics={"Acc-Pass@1": 0.5, "Acc-Mean@8": 0.5, "Acc-Best@8": 0.75, "Response-Length-Mean": 31.25},
)


@pytest.fixture(scope="module")
def read_log():
    return load_script("read_log")


def write_log(path: Path, *results: EvalResult) -> Path:
    write_result_log(path, ["loading the model", *format_result_lines(results), "done"])
    return path


def write_run(folder: Path, *steps: tuple[int, dict]) -> Path:
    folder.mkdir()
    lines = [json.dumps({"step": step, "data": data}) for step, data in steps]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def read_csv(path: Path) -> tuple[list[str], list[list[str]]]:
    with open(path, newline="") as file:
        header, *rows = csv.reader(file)
    return header, rows


# ---- result lines ----


def test_result_lines_are_readable_and_parse_back_among_free_text():
    lines = format_result_lines([RESULT, replace(RESULT, step=None, dataset="naïve\n")])
    assert lines[0] == "hapo at step 200 on countdown, 64 questions x 8 samples"
    assert lines[1].split() == ["Acc-Pass@1", "0.5000", "(n=64", "x", "8)"]
    assert json.loads(lines[5].removeprefix("RESULT "))["metrics"]["Acc-Best@8"] == 0.75
    assert not any("\n" in line for line in lines)
    free = ["", "RESULT", "RESULTS {}", " RESULT {}", "RESULT of the day", "the RESULT {"]
    assert parse_result_lines([*free, *lines]) == [RESULT, replace(RESULT, step=None, dataset="naïve\n")]


def test_damaged_result_lines_and_impossible_results_are_refused_by_name():
    for line, message in (
        ('RESULT {"experiment": "a", "st', "eval.log, line 2: bad RESULT line"),
        ('RESULT {"experiment": "a"}', "missing 5 required keyword-only arguments: 'step', 'dataset', 'n_samples'"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_result_lines(["hello", line], source="eval.log")
    with pytest.raises(ValueError, match=r"metrics\['Acc-Pass@1'\] must be .* an accuracy in \[0, 1\], got 50.0"):
        replace(RESULT, metrics={"Acc-Pass@1": 50.0})
    with pytest.raises(ValueError, match=r"metrics\['Length'\] must be finite.* got nan"):
        replace(RESULT, metrics={"Length": float("nan")})


# ---- the table ----


def test_evaluation_logs_become_one_row_per_experiment_and_step(read_log, tmp_path, capsys):
    metrics = {"Response-Length-Mean": 90.5, "Acc-Maj@16": 0.4, "Acc-Maj@4": 0.3, "Acc-Pass@1": 0.2, "Format": 1}
    logs = [
        write_log(tmp_path / "a.log", RESULT, replace(RESULT, step=100, metrics={"Acc-Pass@1": 0.25})),
        write_log(tmp_path / "b.log", replace(RESULT, dataset="gsm8k", metrics=metrics)),
        write_log(tmp_path / "c.log", replace(RESULT, experiment="base", step=None, metrics={"Acc-Pass@1": 0.125})),
    ]
    output = tmp_path / "table" / "metrics.csv"
    read_log.main([*map(str, logs), "--output", str(output)])
    printed = capsys.readouterr()
    beside = [str(output.with_suffix(suffix)) for suffix in (".csv", ".md", ".png")]
    assert printed.out.split() == beside and printed.err == ""
    header, rows = read_csv(output)
    countdown = [f"countdown-{name}" for name in (*RESULT.metrics, "Questions")]
    gsm8k = ["Acc-Pass@1", "Acc-Maj@4", "Acc-Maj@16", "Response-Length-Mean", "Format", "Questions"]
    assert header == ["experiment", "step", *countdown, *(f"gsm8k-{name}" for name in gsm8k)]
    assert rows == [
        ["hapo", "100", "0.25", "", "", "", "64", "", "", "", "", "", ""],
        ["hapo", "200", "0.5", "0.5", "0.75", "31.25", "64", "0.2", "0.3", "0.4", "90.5", "1", "64"],
        ["base", "", "0.125", "", "", "", "64", "", "", "", "", "", ""],
    ]


def test_training_logs_give_their_validation_steps(read_log, tmp_path):
    validation = {
        "val-core/countdown/acc/mean@8": 0.25,
        "val-core/countdown/acc/best@8/mean": 0.5,
        "val-core/countdown/acc/best@8/std": 0.01,
        "val-core/countdown/acc/maj@8/mean": 0.375,
        "val-aux/countdown/acc/best@4/mean": 0.4,
        "val-aux/countdown/reward/mean@8": 0.9,
        "val-aux/countdown/response_length/mean@2": 99.0,
        "val-aux/countdown/response_length/mean@8": 31.5,
        "val-aux/countdown/response_length/std@8": 3.0,
        "val-aux/num_turns/mean": 2.0,
        "val-core/openai/gsm8k/acc/mean@1": 0.125,
        "actor/entropy": 0.3,
    }
    later = validation | {"val-core/countdown/acc/mean@8": 0.75}
    run = write_run(tmp_path / "hapo", (0, validation), (1, {"actor/entropy": 0.2}), (2, later))
    output = tmp_path / "metrics.csv"
    read_log.main([str(run), "--output", str(output)])
    header, rows = read_csv(output)
    assert dict(zip(header, rows[0], strict=True)) == {
        "experiment": "hapo",
        "step": "0",
        "countdown-Acc-Pass@1": "0.25",
        "countdown-Acc-Mean@8": "0.25",
        "countdown-Acc-Best@8": "0.5",
        "countdown-Acc-Maj@8": "0.375",
        "countdown-Response-Length-Mean": "31.5",
        "openai/gsm8k-Acc-Pass@1": "0.125",
        "openai/gsm8k-Acc-Mean@1": "0.125",
    }
    assert [row[:4] for row in rows] == [["hapo", "0", "0.25", "0.25"], ["hapo", "2", "0.75", "0.75"]]


def test_validation_metrics_of_verl_are_understood(read_log):
    """verl's own aggregation of two questions x two samples, right 1 of 2 and 2 of 2, lengths 10 to 40."""
    from verl.trainer.ppo.metric_utils import process_validation_metrics

    samples = {"acc": [1.0, 0.0, 1.0, 1.0], "pred": ["7", "8", "5", "5"], "response_length": [10, 20, 30, 40]}
    logs = process_validation_metrics(["countdown"] * 4, ["q1", "q1", "q2", "q2"], samples)["countdown"]
    logged = {f"val-core/countdown/acc/{name}": value for name, value in logs["acc"].items()}
    logged |= {f"val-aux/countdown/response_length/{name}": value for name, value in logs["response_length"].items()}
    results = read_log.validation_results(logged)
    names = ["Acc-Pass@1", "Acc-Mean@2", "Acc-Best@2", "Acc-Maj@2", "Response-Length-Mean"]
    assert sorted(results) == sorted(("countdown", name) for name in names)
    assert results["countdown", "Acc-Pass@1"] == results["countdown", "Acc-Mean@2"] == 0.75
    assert results["countdown", "Response-Length-Mean"] == 25.0
    # two draws with replacement from (1, 0) hold a 1 with chance 3/4: (0.75 + 1) / 2, by 1000 draws
    assert results["countdown", "Acc-Best@2"] == pytest.approx(0.875, abs=0.03)


def test_training_and_evaluation_of_one_experiment_share_a_row(read_log, tmp_path, capsys):
    run = write_run(tmp_path / "hapo", (200, {"val-core/countdown/acc/mean@4": 0.25}))
    log = write_log(tmp_path / "eval.log", RESULT)
    output = tmp_path / "metrics.csv"
    (run / "train.log").write_text("step:200 - val-core/countdown/acc/mean@4:0.25\n")
    assert read_log.read_log(run / "train.log") == read_log.read_log(run)
    read_log.main([str(run), str(log), "--output", str(output)])
    header, rows = read_csv(output)
    assert len(rows) == 1
    row = dict(zip(header, rows[0], strict=True))
    assert row["countdown-Acc-Mean@4"] == "0.25" and row["countdown-Acc-Mean@8"] == "0.5"
    assert row["countdown-Acc-Pass@1"] == "0.5"  # the later log wins, and says so
    warning = f"read_log: hapo, step 200, countdown-Acc-Pass@1: 0.5 ({log}) replaces 0.25 ({run})"
    assert capsys.readouterr().err.splitlines() == [warning]


def test_errors_name_the_file_and_leave_the_old_table(read_log, tmp_path):
    empty = tmp_path / "empty.log"
    empty.write_text("the model was loaded\n")
    no_validation = write_run(tmp_path / "run", (1, {"actor/entropy": 1.0}))
    good = write_log(tmp_path / "good.log", RESULT)
    output = tmp_path / "metrics.csv"
    output.write_text("old")
    for log, message in (
        (tmp_path / "nowhere.log", "no such log"),
        (empty, "no lines like RESULT {json}"),
        (no_validation, "no validation accuracy; expected metrics like val-core/<dataset>/acc/mean@8"),
    ):
        with pytest.raises(SystemExit) as error:
            read_log.main([str(good), str(log), "--output", str(output)])
        assert error.value.code.startswith(f"read_log: {log}: {message}")
    assert output.read_text() == "old"


# ---- the comparison ----


def cell(read_log, experiment, step, metric, value, dataset="countdown"):
    return read_log.Cell(experiment, step, dataset, metric, value, Path("a.log"))


def test_the_comparison_shows_every_experiment_at_its_last_step(read_log):
    cells = [
        cell(read_log, "grpo", 20, "Acc-Pass@1", 0.1),
        cell(read_log, "grpo", 40, "Acc-Pass@1", 0.25),
        cell(read_log, "grpo", 40, "Acc-Pass@1-Low", 0.2),
        cell(read_log, "grpo", 40, "Acc-Pass@1-High", 0.375),
        cell(read_log, "warm_start", None, "Acc-Pass@1", 0.125),
        cell(read_log, "warm_start", None, "Acc-Best@8", 0.5),
        cell(read_log, "warm_start", None, "Response-Length-Mean", 9.25),
        cell(read_log, "warm_start", None, "Acc-Pass@1", 0.375, dataset="math500"),
    ]
    results = read_log.at_the_last_step(cells)
    assert list(results) == ["grpo (step 40)", "warm_start"]
    assert results["grpo (step 40)"]["countdown"]["Acc-Pass@1"] == 0.25
    text = read_log.markdown(results).splitlines()
    assert text[2:6] == [
        "| experiment | countdown | math500 | average |",
        "|---|---|---|---|",
        "| grpo (step 40) | 0.250 (0.200 to 0.375) |  |  |",
        "| warm_start | 0.125 | 0.375 | 0.250 |",
    ]
    assert text[9:12] == [
        "| experiment | Pass@1 | Best@8 | Response-Length-Mean |",
        "|---|---|---|---|",
        "| grpo (step 40) | 0.250 (0.200 to 0.375) |  |  |",
    ]


def test_an_interval_is_not_given_to_another_logs_value(read_log):
    evaluated = [cell(read_log, "grpo", 40, f"Acc-Pass@1{end}", 0.25) for end in ("", "-Low", "-High")]
    validated = read_log.Cell("grpo", 40, "countdown", "Acc-Pass@1", 0.4, Path("run"))
    results = read_log.at_the_last_step([*evaluated, validated])
    assert results == {"grpo": {"countdown": {"Acc-Pass@1": 0.4}}}
