"""Evaluations against a real server on loopback whose answers are known: numbers, resuming, tools, judge, errors."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recipe.common.tiny_model import write_tiny_model
from tests.configs import evaluation_config
from tests.evaluation.echo_tool import Echo
from tests.evaluation.toy_server import ToyModel, toy_server
from tests.refusals import refused, says
from verl.evaluation.main import EvaluationError, evaluate, plan_of
from verl.evaluation.run import seed_of
from verl.evaluation.scores.results import parse_result_lines
from verl.evaluation.scores.sample_file import SampleFile

ROOT = Path(__file__).resolve().parents[2]
N = 4


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("evaluation")
    write_tiny_model(folder / "model")
    rows = [{"id": f"q{i}", "question": f"What is {i} + {i + 2}?", "answer": str(2 * i + 2)} for i in range(20)]
    (folder / "hotpotqa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def config_of(inputs: Path, url: str | None, output: Path, *overrides: str):
    settings = ["experiment=toy", "benchmark=hotpotqa", f"files={inputs}/hotpotqa.jsonl", f"n={N}", "ks=[1,2,4]"]
    settings += [f"server.url={url or 'null'}", f"server.tokenizer={inputs}/model", f"output_dir={output}"]
    return evaluation_config(*settings, "max_tokens=200", *overrides)


def samples_of(output: Path) -> list[dict]:
    return [json.loads(line) for line in (output / "toy/hotpotqa.jsonl").read_text().splitlines()][1:]


def right(question: int, sample: int, seed: int = 0) -> bool:
    import random

    return random.Random(seed_of(seed, f"q{question}", sample)).random() >= 1 / 3


@pytest.mark.parametrize("api", ["tokens", "chat"])
def test_numbers_are_those_of_the_known_answers(inputs, tmp_path, api):
    model = ToyModel(seconds=0.01)
    with toy_server(model) as url:
        evaluate(config_of(inputs, url, tmp_path, f"server.api={api}", "style=answer"))
    (result,) = parse_result_lines((tmp_path / "toy/hotpotqa.log").read_text().splitlines())
    counts = [sum(right(q, i) for i in range(N)) for q in range(20)]
    assert result.metrics["Acc-Pass@1"] == pytest.approx(sum(counts) / 80)
    assert result.metrics["Acc-Pass@4"] == pytest.approx(sum(count > 0 for count in counts) / 20)
    assert result.metrics["Acc-Pass@1-Low"] < result.metrics["Acc-Pass@1"] < result.metrics["Acc-Pass@1-High"]
    assert result.metrics["F1-Mean"] == pytest.approx(sum(counts) / 80)
    rows = samples_of(tmp_path)
    assert len(rows) == 80 and all(row["tokens"] > 3 and row["tool_calls"] is None for row in rows)
    assert model.most_at_once > 10, "many at once"


@pytest.mark.slow
def test_a_killed_run_goes_on_and_loses_nothing(inputs, tmp_path):
    model = ToyModel(seconds=0.05)
    with toy_server(model) as url:
        settings = [f"files={inputs}/hotpotqa.jsonl", f"server.url={url}", f"server.tokenizer={inputs}/model"]
        settings += ["experiment=toy", "benchmark=hotpotqa", f"n={N}", "ks=[1,2,4]", "max_tokens=200"]
        settings += [f"output_dir={tmp_path}", "server.concurrency=2", "style=answer"]
        command = [sys.executable, "scripts/evaluate.py", *settings]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        file, deadline = tmp_path / "toy/hotpotqa.jsonl", time.monotonic() + 120
        while time.monotonic() < deadline and (not file.exists() or len(file.read_bytes().splitlines()) < 12):
            time.sleep(0.05)
        process.kill()
        process.wait()
        kept = samples_of(tmp_path)
        assert 11 <= len(kept) < 80
        file.write_bytes(file.read_bytes() + b'{"question": "q3", "sam')  # a line that the kill tore
        asked = len(model.asked)
        evaluate(config_of(inputs, url, tmp_path, "style=answer"))
        assert len(model.asked) - asked == 80 - len(kept), "only what was missing"
        rows = samples_of(tmp_path)
        assert rows[: len(kept)] == kept and len({(row["question"], row["sample"]) for row in rows}) == 80
        assert all(row["score"] == right(int(row["question"][1:]), row["sample"]) for row in rows)
        evaluate(config_of(inputs, url, tmp_path, "style=answer"))
        assert len(model.asked) - asked == 80 - len(kept), "a complete file asks nothing"


def test_another_evaluation_does_not_go_on_in_the_same_file(inputs, tmp_path):
    with toy_server(ToyModel()) as url:
        evaluate(config_of(inputs, url, tmp_path, "limit=2"))
        with pytest.raises(EvaluationError, match=r"temperature=0.6 there, 0.7 now.*another output_dir"):
            evaluate(config_of(inputs, url, tmp_path, "limit=2", "temperature=0.7"))
        evaluate(config_of(inputs, url, tmp_path, "limit=3"))  # more questions are no other evaluation
        with pytest.raises(EvaluationError, match=r"server=.*'name': None.* there, .*'name': 'another'.* now"):
            evaluate(config_of(inputs, url, tmp_path, "limit=2", "server.name=another"))
        changed = tmp_path / "hotpotqa.jsonl"
        changed.write_text((inputs / "hotpotqa.jsonl").read_text().replace('"answer": "2"', '"answer": "3"'))
        with pytest.raises(EvaluationError, match=r"data='\w+' there, '\w+' now; files="):
            evaluate(config_of(inputs, url, tmp_path, "limit=2", f"files={changed}"))
    assert len(samples_of(tmp_path)) == 3 * N
    with (
        SampleFile(tmp_path / "x.jsonl", {}),
        pytest.raises(ValueError, match="x.jsonl: another evaluation is writing"),
    ):
        SampleFile(tmp_path / "x.jsonl", {})
    (tmp_path / "x.jsonl").write_text('{"settings": {}}\n{"question": 1}\n{"question": "1", "sample": 0}\n')
    with pytest.raises(ValueError, match="x.jsonl, line 2"):
        SampleFile(tmp_path / "x.jsonl", {})


def test_a_file_without_samples_takes_other_settings(tmp_path):
    """Such as one of an evaluation whose server refused the first request."""
    for settings in ({"temperature": 0.6}, {"temperature": 0.7}):
        with SampleFile(tmp_path / "x.jsonl", settings) as samples:
            assert not samples.rows
    samples_now = '{"settings": {"temperature": 0.7}}\n'
    assert (tmp_path / "x.jsonl").read_text() == samples_now


def test_a_larger_n_adds_the_missing_samples_and_measures_anew(inputs, tmp_path):
    with toy_server(model := ToyModel()) as url:
        evaluate(config_of(inputs, url, tmp_path, "style=answer"))
        first, asked = samples_of(tmp_path), len(model.asked)
        evaluate(config_of(inputs, url, tmp_path, "style=answer", "n=7", "ks=[1,7]"))
        assert len(model.asked) - asked == 20 * (7 - N)
        evaluate(config_of(inputs, url, tmp_path / "at_once", "style=answer", "n=7", "ks=[1,7]"))
        assert samples_of(tmp_path)[: len(first)] == first, "earlier samples are kept"
        seen = [
            {(row["question"], row["sample"], row["response"]) for row in samples_of(tmp_path / part)}
            for part in ("", "at_once")
        ]
        assert seen[0] == seen[1], "the samples of one evaluation with n=7"
        logs = [tmp_path / part / "toy/hotpotqa.log" for part in ("", "at_once")]
        results = [parse_result_lines(log.read_text().splitlines())[0] for log in logs]
        assert results[0].metrics == results[1].metrics and results[0].n_samples == 7
        evaluate(config_of(inputs, url, tmp_path, "style=answer"))
        assert len(model.asked) - asked == 20 * (7 - N) + 20 * 7, "a smaller n asks nothing"
    (again,) = parse_result_lines((tmp_path / "toy/hotpotqa.log").read_text().splitlines())
    assert again.n_samples == N and again.metrics["Acc-Pass@1"] == pytest.approx(sum(r["score"] for r in first) / 80)


@pytest.mark.parametrize("environment", ["tools", "chat"])
def test_tools_are_called_with_the_protocol_of_training(inputs, tmp_path, environment):
    tools, mark = ["tools.call_limit=2"], {"tools": "<search>", "chat": "<tool_call>"}[environment]
    if environment == "chat":
        tools.append("environment=chat")
    tools.append("+tools.tool_instances.search.class_path=tests.evaluation.echo_tool.Echo")
    model, closed = ToyModel(), Echo.closed
    with toy_server(model) as url:
        evaluate(config_of(inputs, url, tmp_path, *tools, "limit=5", "max_tokens=1000"))
    assert Echo.closed == closed + 1
    rows = samples_of(tmp_path)
    assert len(rows) == 20 and all(row["tool_calls"] == 1 for row in rows)
    assert all(mark in row["response"] and "you asked" in row["response"] for row in rows)
    # turns have seeds of their own
    assert all(row["score"] == (int(row["answer"]) == 2 * int(row["question"][1:]) + 2) for row in rows)
    (result,) = parse_result_lines((tmp_path / "toy/hotpotqa.log").read_text().splitlines())
    assert result.metrics["Tool-Calls-Mean"] == 1


@pytest.mark.slow
def test_an_mcp_servers_tools_are_called(inputs, tmp_path):
    library = f"{sys.executable}, {ROOT}/tests/workers/rollout/tools/mcp/mcp_library.py"
    entry = f"{{class_path: verl.workers.rollout.tools.mcp.tool.MCPTool, params: {{command: [{library}]}}}}"
    tools = [f"+tools.tool_instances.library={entry}"]
    with toy_server(model := ToyModel()) as url:
        evaluate(config_of(inputs, url, tmp_path, *tools, "limit=2", "n=1", "ks=[1]", "style=answer"))
    rows = samples_of(tmp_path)
    assert len(rows) == 2 and all("about " in row["response"] and row["tool_calls"] == 1 for row in rows)
    prompts = [model.tokenizer.decode(asked["prompt"]) for asked in model.asked]
    assert all("<who_am-i>…</who_am-i> calls the tool who_am-i" in prompt for prompt in prompts)


def test_a_judge_is_asked_once_and_unreadable_verdicts_are_counted(inputs, tmp_path):
    for verdict, score in (("Same.\nVERDICT: CORRECT", 1.0), ("I would say yes", None)):
        judge, output = ToyModel(verdict=verdict), tmp_path / str(score)
        with toy_server(ToyModel()) as url, toy_server(judge) as judge_url:
            more = ["scoring=judge", f"judge.url={judge_url}", "judge.temperature=null", "limit=3"]
            if score is None:
                with pytest.raises(EvaluationError, match="no question has so many samples with a score"):
                    evaluate(config_of(inputs, url, output, *more))
            else:
                evaluate(config_of(inputs, url, output, *more))
            assert {row["score"] for row in samples_of(output)} == {score}
        assert 3 <= len(judge.asked) <= 6, "equal answers to one question are one request"
        assert all(asked.keys() == {"model", "messages", "max_completion_tokens"} for asked in judge.asked)


@pytest.mark.parametrize("api", ["tokens", "chat"])
def test_a_small_context_cuts_responses_and_loses_long_questions(inputs, tmp_path, api):
    """One question does not fit; the responses to the other one, which need 12 tokens, get 6 of the 200 asked for."""
    model, short = ToyModel(), "What is 1 + 2?"
    tokenizer, messages = model.tokenizer, [{"role": "user", "content": short}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    ids = ids if api == "tokens" else tokenizer.encode(short, add_special_tokens=False)
    model.context = len(ids) + 6
    rows = [{"id": name, "question": text, "answer": "3"} for name, text in (("a", short), ("b", "7 " * 60 + short))]
    (file := tmp_path / "hotpotqa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    about = [f"files={file}", "style=plain"]
    with toy_server(model) as url:
        evaluate(config_of(inputs, url, tmp_path, *about, f"server.api={api}"))
        lines = (tmp_path / "toy/hotpotqa.log").read_text().splitlines()
        model.context = len(ids)
        with pytest.raises(EvaluationError, match="holds no response: .*delete it"):
            evaluate(config_of(inputs, url, tmp_path / "none", *about, f"server.api={api}"))
    (result,) = parse_result_lines(lines)
    assert result.metrics["Lost-Share"] == result.metrics["Cut-Share"] == 0.5
    assert any("Acc-Pass@1 " in line and "(n=2 x 4, 50.0% cut)" in line for line in lines)


def test_responses_that_call_tools_without_end_are_cut(inputs, tmp_path):
    tools = ["tools.call_limit=0", "+tools.tool_instances.search.class_path=tests.evaluation.echo_tool.Echo"]
    with toy_server(ToyModel()) as url:
        evaluate(config_of(inputs, url, tmp_path, *tools, "limit=2"))
    assert all(row["cut"] for row in samples_of(tmp_path))


def test_a_busy_server_is_asked_again(inputs, tmp_path):
    model = ToyModel(failures=3)
    with toy_server(model) as url:
        evaluate(config_of(inputs, url, tmp_path, "limit=2"))
    assert len(samples_of(tmp_path)) == 2 * N and len(model.asked) == 2 * N + 3


@pytest.mark.parametrize(("overrides", "message"), refused(__file__, "run"))
def test_wrong_settings_are_named_before_anything_starts(inputs, tmp_path, monkeypatch, overrides, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORN_KEY", "s3cr3t\r")
    with pytest.raises(EvaluationError) as error:
        plan_of(config_of(inputs, "http://127.0.0.1:9", tmp_path, *overrides.split()))
    assert says(error.value, message)


def test_servers_that_are_no_help_are_named(inputs, tmp_path):
    with pytest.raises(EvaluationError, match="127.0.0.1:9 does not list its models"):
        evaluate(config_of(inputs, "http://127.0.0.1:9", tmp_path))
    with toy_server(ToyModel(token_ids=False)) as url, pytest.raises(ValueError, match="gives no token ids"):
        evaluate(config_of(inputs, url, tmp_path / "b"))
