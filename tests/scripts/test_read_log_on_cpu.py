"""scripts/read_log.py and verl.evaluation.scores.results: result lines round-trip, the CSV holds the logs' numbers."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.scripts.loading import load_script
from verl.evaluation.scores.results import EvalResult, format_result, parse_result_lines

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
    lines = [line for result in results for line in format_result(result)]
    path.write_text("\n".join(["loading the model", *lines, "done"]))
    return path


def read_csv(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


# ---- result lines ----


def test_result_lines_are_readable_and_parse_back_among_free_text():
    untrained = replace(RESULT, step=None, dataset="naïve\n")
    lines = [*format_result(RESULT), *format_result(untrained)]
    assert lines[0] == "hapo at step 200 on countdown, 64 questions x 8 samples"
    assert lines[1].split() == ["Acc-Pass@1", "0.5000", "(n=64", "x", "8)"]
    assert json.loads(lines[5].removeprefix("RESULT "))["metrics"]["Acc-Best@8"] == 0.75
    assert not any("\n" in line for line in lines)
    free = ["", "RESULT", "RESULTS {}", " RESULT {}", "RESULT of the day", "the RESULT {"]
    assert parse_result_lines([*free, *lines]) == [RESULT, untrained]


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
    ends = {"Acc-Pass@1-Low": 0.2, "Acc-Pass@1-High": 0.3}
    logs = [
        write_log(tmp_path / "a.log", RESULT, replace(RESULT, step=100, metrics={"Acc-Pass@1": 0.25} | ends)),
        write_log(
            tmp_path / "b.log", replace(RESULT, dataset="gsm8k", metrics={"Acc-Pass@1": 0.2, "Cut-Share": 0.125})
        ),
        write_log(tmp_path / "c.log", replace(RESULT, experiment="base", step=None, metrics={"Acc-Pass@1": 0.125})),
        # the later of two results counts
        write_log(tmp_path / "d.log", replace(RESULT, metrics={"Acc-Pass@1": 0.75})),
    ]
    output = tmp_path / "table" / "metrics.csv"
    read_log.main([*map(str, logs), "--output", str(output)])
    assert capsys.readouterr().out.split() == [str(output), str(output.with_suffix(".md"))]
    rows = {(row["experiment"], row["step"]): row for row in read_csv(output)}
    assert list(rows) == [("base", ""), ("hapo", "100"), ("hapo", "200")]
    values = {name: value for name, value in rows["hapo", "200"].items() if value}
    assert values == {
        "experiment": "hapo",
        "step": "200",
        "countdown-Acc-Pass@1": "0.75",
        "countdown-Acc-Mean@8": "0.5",
        "countdown-Acc-Best@8": "0.75",
        "countdown-Response-Length-Mean": "31.25",
        "countdown-Questions": "64",
        "gsm8k-Acc-Pass@1": "0.2",
        "gsm8k-Cut-Share": "0.125",
        "gsm8k-Questions": "64",
    }
    text = output.with_suffix(".md").read_text().splitlines()
    assert text[0] == "## countdown" and text[4:7] == [
        "| base |  | 0.125 | 64 |  |",
        "| hapo | 100 | 0.250 (0.200 to 0.300) | 64 |  |",
        "| hapo | 200 | 0.750 | 64 |  |",
    ]
    assert text[8] == "## gsm8k" and text[12:] == ["| hapo | 200 | 0.200 | 64 | 12.5% |"]


def test_errors_name_the_file_and_leave_the_old_table(read_log, tmp_path):
    empty = tmp_path / "empty.log"
    empty.write_text("the model was loaded\n")
    good = write_log(tmp_path / "good.log", RESULT)
    output = tmp_path / "metrics.csv"
    output.write_text("old")
    for log, message in ((tmp_path / "nowhere.log", "No such file"), (empty, "no lines like RESULT {json}")):
        with pytest.raises(SystemExit) as error:
            read_log.main([str(good), str(log), "--output", str(output)])
        assert str(log) in error.value.code and message in error.value.code
    assert output.read_text() == "old"
