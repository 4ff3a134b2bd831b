"""Files of mathematics in each published layout against rows given by hand."""

import json

import pandas as pd
import pytest

from recipe.tasks.mathematics.data import main
from recipe.tasks.mathematics.reward import compute_score
from tests.evaluation.questions.layouts import read, verl_row, write
from tests.tables import table
from verl.evaluation.questions.prompts import BOXED_INSTRUCTION
from verl.trainer.checks.rows import check_data_files

DAPO_PROMPT = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n{}\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)


def dapo_row(question: str, answer: str, index: str = "x") -> dict:
    return {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": DAPO_PROMPT.format(question)}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": index},
    }


# name -> (row as published, question, answer)
LAYOUTS = {name: case for name, *case in table(__file__, "layouts")}
LAYOUTS["dapo-math-17k"] = (dapo_row("In $x$?\nFind it.", "34"), "In $x$?\nFind it.", "34")


def test_csv_as_spreadsheets_write_it_with_fields_longer_than_pythons_limit(tmp_path):
    source, output = tmp_path / "source.csv", tmp_path / "out.parquet"
    question = "one,\r\ntwo\u2028?" + " How many?" * 20_000  # Python's csv refuses fields above 131,072 characters
    source.write_bytes(f'\ufeffproblem,answer\r\n"{question}",5\r\n'.encode())
    main(["--name", "math500", "--input", str(source), "--output", str(output)])
    (row,) = pd.read_parquet(output).to_dict("records")
    assert row["prompt"][0]["content"].startswith(f"{question}\n")
    assert row["reward_model"]["ground_truth"] == "5"


def convert(tmp_path, rows, name="math500", suffix=".jsonl", *options) -> list[dict]:
    source, output = write(tmp_path / f"source{suffix}", rows), tmp_path / "out" / "made.parquet"
    main(["--name", name, "--input", str(source), "--output", str(output), *options])
    check_data_files("data.train_files", str(output), "prompt")
    return pd.read_parquet(output).to_dict("records")


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_each_layout(tmp_path, name, suffix):
    published, question, answer = LAYOUTS[name]
    (row,) = convert(tmp_path, [published], name, suffix)
    assert row["data_source"] == ("math_dapo" if name == "dapo-math-17k" else name)
    assert list(row["prompt"]) == [{"role": "user", "content": f"{question}\n\n{BOXED_INSTRUCTION}"}]
    assert row["reward_model"] == {"style": "rule", "ground_truth": answer}
    assert row["extra_info"] == {"index": 0, "split": "train" if name in ("math", "dapo-math-17k") else "test"}
    assert compute_score(name, rf"\boxed{{{answer}}}", row["reward_model"]["ground_truth"])["acc"] == 1.0


@pytest.mark.parametrize(
    ("source", "response", "right"),
    [
        ("math_dapo", "Answer: 33\nanswer: $34$.", 1),
        ("math_dapo", "Answer: 33", 0),
        ("math_dapo", r"\boxed{33} Answer: 34", 0),
        ("math_dapo", "Answer: }", 0),
        ("math_dapo", "answer" + " \n" * 100_000, 0),
        ("math500", "Answer: 34", 0),
    ],
)
def test_without_a_box_the_last_answer_line_counts_where_the_prompt_asks_for_it(source, response, right):
    assert compute_score(source, response, "34")["acc"] == right


def test_repeats_are_left_out(tmp_path, capsys):
    rows = [dapo_row("a?", "1"), dapo_row("b?", "2"), *[dapo_row("a?", "1")] * 5, dapo_row("b?", "3")]
    made = convert(tmp_path, rows, "dapo-math-17k", ".parquet", "--data-source", "mine")
    assert [row["reward_model"]["ground_truth"] for row in made] == ["1", "2"]
    assert {row["data_source"] for row in made} == {"mine"}
    assert "left out: 6" in capsys.readouterr().out


def test_converting_again_changes_nothing(tmp_path):
    first = convert(tmp_path, [LAYOUTS["math500"][0]])
    again = convert(tmp_path, [{**row, "prompt": list(row["prompt"])} for row in first])
    assert json.dumps(again, default=list) == json.dumps(first, default=list)


BAD = [
    {"problem": "fine?", "answer": "1"},
    {"problem": " ", "answer": "1"},
    {"problem": "no answer?", "solution": "none boxed"},
    {"problem": "none?", "answer": None},
    {"question": "list?", "final_answer": []},
    {"question": "hole?", "final_answer": ["1", ""]},
    {"problem": "nan?", "answer": float("nan")},
    {"problem": "see the picture", "answer": "1", "image_1": "bytes"},
]


def test_bad_rows_stop_the_run_and_are_listed(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        convert(tmp_path, BAD)
    message = str(stopped.value)
    assert "source.jsonl" in message and "1 row(s) 1;" in message and "5 row(s) 2, 3, 4, 5, 6" in message
    assert "needs an image: 1 row(s) 7" in message and "--skip-bad-rows" in message
    assert not list((tmp_path / "out").glob("*")) if (tmp_path / "out").exists() else True
    assert len(convert(tmp_path, BAD, "math500", ".jsonl", "--skip-bad-rows")) == 1
    assert "left out" in capsys.readouterr().out


@pytest.mark.parametrize("row", table(__file__, "half a character is named by its row"))
def test_half_a_character_is_named_by_its_row(tmp_path, row):
    with pytest.raises(SystemExit, match="has half a character, .*: 1 row.s. 1; --skip-bad-rows leaves them out"):
        convert(tmp_path, [BAD[0], row])
    assert len(convert(tmp_path, [BAD[0], row], "math500", ".jsonl", "--skip-bad-rows")) == 1


def test_the_instruction_of_training_data_is_not_the_question(tmp_path):
    (question,) = read(tmp_path, "math", [verl_row("1", f"p?\n\n{BOXED_INSTRUCTION}")]).questions
    assert question.text == "p?" and question.prompt[-1]["content"] == f"p?\n\n{BOXED_INSTRUCTION}"


@pytest.mark.parametrize("answer", ["40*27=1080", "#### ", "", None])
def test_gsm8k_without_its_number(tmp_path, answer):
    rows = [{"question": "How many?", "answer": answer}, {"question": "q?", "answer": "x y"}]
    with pytest.raises(ValueError, match="no number after ####"):
        read(tmp_path, "gsm8k", rows)


@pytest.mark.parametrize(("file", "content", "message"), table(__file__, "damaged files"))
def test_damaged_files_are_named(tmp_path, file, content, message):
    source = tmp_path / (file or "missing.jsonl")
    if file:
        source.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(SystemExit, match=message):
        main(["--name", "math500", "--input", str(source), "--output", str(tmp_path / "out.parquet")])
    assert not (tmp_path / "out.parquet").exists()
