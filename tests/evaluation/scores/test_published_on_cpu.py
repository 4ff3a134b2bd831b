"""A published number is compared with an evaluation: the interval, and each setting that differs or is not stated."""

import pytest

from verl.evaluation.scores.published import main
from verl.evaluation.scores.results import EvalResult, format_result_lines, write_result_log

SETTINGS = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_tokens": 8192, "repetition_penalty": 1.0, "stop": []}
SETTINGS |= {"seed": 0, "prompt": "boxed", "apply_chat_template_kwargs": {}, "tools": [], "scoring": "math"}
METRICS = {"Acc-Pass@1": 0.887, "Acc-Pass@1-Low": 0.86, "Acc-Pass@1-High": 0.91, "Response-Length-Mean": 310.0}


@pytest.fixture
def log(tmp_path):
    """The log of an evaluation of GSM8K, in which a judge is not recorded."""
    result = EvalResult(
        experiment="hapo", step=9, dataset="gsm8k", n_samples=8, n_questions=1319, metrics=METRICS, settings=SETTINGS
    )
    path = tmp_path / "gsm8k.log"
    write_result_log(path, ["free text", *format_result_lines([result])])
    return path


def compared(capsys, log, *published) -> tuple[dict[str, list[str]], list[str]]:
    """Return the table's rows by their first cell, and the sentences after it."""
    main([str(log), *map(str, published)])
    lines = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return {row[0]: row[1:] for row in cells}, [line for line in lines if line and not line.startswith("|")]


@pytest.mark.parametrize(("value", "verdict"), [(0.912, "above"), (0.9, "inside"), (0.86, "inside"), (0.5, "below")])
def test_the_value_beside_the_interval(capsys, log, value, verdict):
    rows, sentences = compared(capsys, log, "metric=Acc-Pass@1", f"value={value}")
    assert rows["Acc-Pass@1"][:2] == [f"{value:.3f}", "0.887 (0.860 to 0.910)"]
    assert f"is {verdict} the 95 % interval" in sentences[0]


def test_what_differs_and_what_is_not_stated(capsys, log):
    more = ["n=1", "temperature=0.6", "prompt=eight examples", "judge=gpt-4", "questions=1319", "repetition_penalty=1"]
    rows, sentences = compared(capsys, log, "source=The paper", "metric=Acc-Pass@1", "value=0.9", *more)
    assert rows["gsm8k"][:2] == ["The paper", "hapo"]
    assert rows["n"] == ["1", "8", "differs"] and rows["prompt"] == ["eight examples", "boxed", "differs"]
    assert rows["temperature"][2] == rows["questions"][2] == rows["repetition_penalty"][2] == "same"
    assert rows["judge"] == ["gpt-4", "-", "not recorded"] and rows["top_p"] == ["-", "0.95", "not stated"]
    assert rows["stop"] == ["-", "none", "not stated"]
    assert sentences[1] == "The settings differ in n, prompt."
    assert sentences[2] == "The published row does not state top_p, top_k, max_tokens, stop, tools, scoring."


def test_a_file_of_rows_of_which_those_of_the_data_set_are_compared(capsys, log, tmp_path):
    (tmp_path / "rows.yaml").write_text(
        "- {source: 'table 1 | GRPO', dataset: gsm8k, metric: Acc-Pass@1, value: 0.9, tools: []}\n"
        "- {source: table 1, dataset: aime24, metric: Acc-Pass@1, value: 0.2}\n"
        "- {source: table 2, dataset: gsm8k, metric: Response-Length-Mean, value: 1}\n"
    )
    main([str(log), str(tmp_path / "rows.yaml")])
    printed = capsys.readouterr().out
    assert printed.count("| gsm8k |") == 2 and "aime24" not in printed
    assert "| gsm8k | table 1 \\| GRPO | hapo | |" in printed and "| tools | none | none | same |" in printed
    assert "| Response-Length-Mean | 1.000 | 310.000 | |" in printed and printed.count("interval") == 1


@pytest.mark.parametrize(
    ("published", "message"),
    [
        (["metric=Acc-Pass@1"], "published row 0: expected metric and value"),
        (["metric=Acc-Pass@1", "value=91.2"], "value=91.2: expected a share from 0 to 1, such as 0.912"),
        (["metric=Acc-Pass@1", "value=0.9", "temprature=1"], "unknown temprature; choose from metric, value"),
        (["metric=Acc-Pass@2", "value=0.9"], "metric=Acc-Pass@2: the evaluation has Acc-Pass@1, "),
        (["metric=Acc-Pass@1", "value=0.9", "dataset=math"], "no published row is about gsm8k"),
        (["nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_mistakes_are_named(log, published, message):
    with pytest.raises(SystemExit, match=message):
        main([str(log), *published])


def test_a_log_without_results_is_named(tmp_path):
    (tmp_path / "train.log").write_text("step 1\n")
    with pytest.raises(SystemExit, match="train.log: no lines like RESULT"):
        main([str(tmp_path / "train.log"), "metric=Acc-Pass@1", "value=0.9"])
