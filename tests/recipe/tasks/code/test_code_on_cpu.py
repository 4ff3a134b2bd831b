"""Unit tests as a reward: published rows, what is right, what is refused, and solutions that cheat."""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from recipe.tasks.code.data import main
from recipe.tasks.code.reward import check_row, compute_score
from tests.evaluation.questions.layouts import read
from tests.recipe.tasks.code.hostile import HARVESTER, SECRET, SOLUTIONS
from tests.tables import table
from tests.workers.rollout.tools.http_server import Server
from tests.workers.rollout.tools.python.test_sandbox_fusion_on_cpu import run_code
from verl.evaluation.scores.scoring import find_scoring
from verl.utils.data_files import read_rows, write_rows

SMALL = {"timeout_seconds": 1.0, "memory_limit_mb": 256, "max_output_bytes": 1 << 16}
FORMS = {
    "program": lambda given, expected: {"inputs": [given], "outputs": [expected]},
    "function": lambda given, expected: {"fn_name": "add", "inputs": [given], "outputs": [expected]},
    "assert": lambda given, expected: {"assert_case": [f"assert add({given}) == {expected}"]},
}


def score(code: str, truth, **options) -> dict:
    return compute_score("code", f"So:\n```python\n{code}\n```\nDone.", truth, **SMALL | options)


@pytest.mark.parametrize("form", FORMS)
def test_hostile_solutions_score_zero_in_bounded_time(form):
    truth = json.dumps(FORMS[form]("1", SECRET))

    def timed(code: str) -> tuple[float, float]:
        started = time.monotonic()
        return score(code, truth)["score"], time.monotonic() - started

    with ThreadPoolExecutor(2) as pool:
        results = dict(zip(SOLUTIONS, pool.map(timed, SOLUTIONS.values()), strict=True))
    assert not {name: points for name, (points, _) in results.items() if points}
    assert not {name: seconds for name, (_, seconds) in results.items() if seconds > 15}


@pytest.mark.parametrize("form", FORMS)
def test_the_harvester_finds_what_its_process_knows(form):
    assert score(HARVESTER, FORMS[form](SECRET, SECRET))["score"] == 1.0


@pytest.mark.parametrize(("code", "truth", "share"), table(__file__, "solutions"))
def test_solutions(code, truth, share):
    result = score(code, truth, continuous=True)
    assert result["score"] == pytest.approx(share) and result["acc"] == float(share == 1)
    assert score(code, json.dumps(truth))["score"] == result["acc"]


def test_the_last_block_is_the_solution_and_the_first_tests_count():
    truth = {"inputs": ["1", "2"], "outputs": ["1", "1"]}
    text = "```python\nprint(2)\n```\nNo:\n```python\nprint(1)\n```"
    assert compute_score("", text, truth, max_tests=1) == {"score": 1.0, "acc": 1.0, "pred": "print(1)"}
    assert compute_score("", text.replace("print(1)", "print(1"), truth)["score"] == 0.0
    assert compute_score("", "print(1)", truth) == {"score": 0.0, "acc": 0.0, "pred": ""}
    for text in (
        "```python\r\nprint('```')\r\n```",
        "```py\nprint('```')```",
        "- ```python\n  print('```')\n  ```",
    ):
        assert compute_score("", text, {"inputs": [""], "outputs": ["```"]})["pred"].strip() == "print('```')"


@pytest.mark.parametrize(("truth", "options", "message"), table(__file__, "refused"))
def test_rows_and_settings_are_refused(truth, options, message):
    with pytest.raises(ValueError, match=message):
        check_row("code", truth, **options)


def test_a_sandbox_fusion_server_runs_programs_and_functions(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the server writes here
    with Server(run_code) as server:
        options = {"sandbox_fusion_url": server.url}
        assert score("print(int(input()) + 1)", FORMS["program"]("1", "2"), **options)["score"] == 1.0
        assert score("def add(a):\n    return a + 1", FORMS["function"]("1", "2"), **options)["score"] == 1.0
        hostile = SOLUTIONS["a text that equals all, with a repr"]
        assert score(hostile, FORMS["program"]("1", SECRET), **options)["score"] == 0.0
        with pytest.raises(ValueError, match="sandbox_fusion_url: expected none"):
            check_row("code", FORMS["assert"]("1", "2"), **options)
        server.shutdown()
    with pytest.raises(RuntimeError, match="the sandbox fails"):
        score("print(1)", FORMS["program"]("1", "2"), **options)


@pytest.mark.parametrize("block", [True, False])
def test_humaneval_and_mbpp_are_judged_as_they_are_published(tmp_path, block):
    prompt = 'def helper(x):\n    return x + 1\n\ndef solve(x):\n    """Double."""\n'
    test = "def check(f):\n    for i in range(20):\n        assert f(helper(i)) == (i + 1, {i + 1: [None]})\n"
    human = {"task_id": "HumanEval/0", "prompt": prompt, "test": test, "entry_point": "solve"}
    mbpp = {"task_id": 11, "text": "Count.", "test_list": ["assert math.isclose(count('aab')['a'], 2)"]}
    mbpp |= {"test_imports": ["import math"]}
    solution = "    return helper(x) - 1, {x: [None]}\n"
    score_of = find_scoring("code").score
    (question,) = read(tmp_path, "humaneval", [human]).questions
    response = f"```python\ndef solve(x):\n{solution}```" if block else solution
    assert prompt in question.text and score_of(question, response).score == 1.0
    assert score_of(question, response.replace("- 1", "- 2")).score == 0.0
    others = [mbpp | {"task_id": 600}, mbpp | {"task_id": 12, "test_setup_code": "root = Node(1)"}]
    questions = read(tmp_path, "mbpp", [mbpp, *others])
    assert len(questions.questions) == 1 and sum(questions.left_out.values()) == 2
    response = "```python\ndef count(text):\n    return Counter(text)\n```"
    assert score_of(questions.questions[0], response).score == 1.0
    builtin = mbpp | {"task_id": 13, "code": "def sum(a, b):\n    pass", "test_list": ["assert sum(1, 2) == 3"]}
    (question,) = read(tmp_path, "mbpp", [builtin]).questions
    for body, points in (("a + b", 1.0), ("a", 0.0)):
        assert score_of(question, f"```python\ndef sum(a, b):\n    return {body}\n```").score == points


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
    assert ("def inc(n):" in text) == (name == "apps")
    assert row["data_source"] == ("codeforces" if name == "verl" else "code")
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
