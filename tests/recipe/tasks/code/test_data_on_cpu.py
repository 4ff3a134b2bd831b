"""Published rows of code become rows in verl's format, which the reward takes."""

import json

import pytest

from recipe.tasks.code.data import main
from recipe.tasks.code.reward import compute_score
from verl.utils.data_files import read_rows, write_rows

IO = {"inputs": ["1\n"], "outputs": ["2\n"]}
PUBLISHED = {
    "taco": {"question": "Add one.", "input_output": json.dumps(IO), "starter_code": ""},
    "apps": {
        "question": "Add one.",
        "input_output": json.dumps({"fn_name": "inc", "inputs": [[1]], "outputs": [[2]]}),
        "starter_code": "def inc(n):\n",
    },
    "contests": {
        "description": "Add one.",
        "public_tests": {"input": ["1\n"], "output": ["2\n"]},
        "private_tests": {"input": [], "output": []},
        "generated_tests": {"input": ["2\n"], "output": ["3\n"]},
    },
    "verl": {
        "data_source": "codeforces",
        "ability": "code",
        "prompt": [{"role": "user", "content": "Add one."}],
        "reward_model": {"ground_truth": json.dumps(IO)},
    },
}


def converted(tmp_path, *rows, options=()):
    write_rows(tmp_path / "in.jsonl", list(rows))
    main(["--input", f"{tmp_path}/in.jsonl", "--output", f"{tmp_path}/out.parquet", *options])
    return list(read_rows(tmp_path / "out.parquet"))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_rows(name, tmp_path):
    (row,) = converted(tmp_path, PUBLISHED[name])
    text = row["prompt"][-1]["content"]
    assert text.startswith("Add one.") and row["ability"] == "code"
    assert ("def inc(n):" in text) == (name == "apps") and row["data_source"] == (
        "codeforces" if name == "verl" else "code"
    )
    body = "def inc(n):\n    return n + 1" if name == "apps" else "print(int(input()) + 1)"
    assert compute_score("", f"```python\n{body}\n```", row["reward_model"]["ground_truth"])["score"] == 1.0
    assert compute_score("", f"```python\n{body} + 1\n```", row["reward_model"]["ground_truth"])["score"] == 0.0


def test_bad_rows_are_named_and_rows_of_mathematics_left_out(tmp_path, capsys):
    rows = [PUBLISHED["taco"], {"question": "q", "input_output": "{}"}, PUBLISHED["verl"] | {"ability": "math"}]
    rows += [PUBLISHED["contests"] | {"input_file": "in.txt"}, {"input_output": json.dumps(IO)}]
    with pytest.raises(SystemExit, match=r"inputs must be a list.*row\(s\) 1.*file of their own.*3.*no question.*4"):
        converted(tmp_path, *rows)
    assert len(converted(tmp_path, *rows, options=["--skip-bad-rows"])) == 1
    assert "another ability, left out: 1" in capsys.readouterr().out
