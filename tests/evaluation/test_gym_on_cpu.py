"""Evaluations with environment=gym: the score is the environment's; an answer that it loses is wrong, and counted."""

import json
from pathlib import Path

import pandas as pd
import pytest
from omegaconf import OmegaConf

from recipe.common.tiny_model import write_tiny_model
from tests.configs import composed, evaluation_config
from tests.evaluation.toy_server import ToyModel, toy_server
from verl.evaluation.main import EvaluationError, evaluate, plan_of
from verl.evaluation.scores.results import parse_result_lines
from verl.trainer.checkpoint_marker import CONFIG_FILE, MARKER

GAMES = "tests.workers.rollout.gym.games"
SUMS = ["environment=gym", f"environment.class_path={GAMES}.Sums"]
ECHO = "+tools.tool_instances.search.class_path=tests.evaluation.echo_tool.Echo"
N = 4


class Adder(ToyModel):
    """Adds 1 in every turn, but for an even seed jumps over the goal: 9. With the goal 3 it makes the game exit."""

    def answer(self, prompt, asked):
        if "goal 3" in prompt:
            return "exit"
        return "1" if asked["seed"] % 2 or "sum" in prompt else "9"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("gym")
    write_tiny_model(folder / "model")
    row = {"prompt": [{"role": "user", "content": "Play."}], "data_source": "x"}
    row["reward_model"] = {"ground_truth": '{"walkthrough": ["1"]}'}
    rows = [row | {"extra_info": {"environment": {"goal": goal}}} for goal in (1, 2, 3, 2)]
    pd.DataFrame(rows).to_parquet(folder / "games.parquet")
    return folder


def config_of(folder: Path, output: Path, *overrides: str):
    settings = ["experiment=toy", "benchmark=textworld", f"files={folder}/games.parquet", f"n={N}"]
    settings += [f"server.tokenizer={folder}/model", f"output_dir={output}", "max_tokens=300"]
    return evaluation_config(*settings, *overrides)


def test_the_score_is_the_environments_and_lost_answers_are_wrong_and_counted(folder, tmp_path):
    with toy_server(Adder()) as url:
        lines = evaluate(config_of(folder, tmp_path, f"server.url={url}", *SUMS))
    rows = [json.loads(line) for line in (tmp_path / "toy/textworld.jsonl").read_text().splitlines()][1:]
    assert len(rows) == 3 * N, "the second question with the goal 2 is a repeat"
    for row in rows:
        if row["question"] == "2":
            assert row["score"] == row["reward"] == row["tokens"] == 0 and "its process has ended" in row["lost"]
        else:
            assert "lost" not in row and row["tool_calls"] is None
            assert row["score"] == row["reward"] == float("9" not in row["response"])
    (result,) = parse_result_lines(lines)
    right = sum(row["score"] for row in rows)
    assert 0 < right < 2 * N and result.metrics["Acc-Pass@1"] == pytest.approx(right / (3 * N))
    assert result.metrics["Lost-Share"] == pytest.approx(1 / 3)
    assert result.metrics["Reward-Mean"] == pytest.approx(right / (3 * N))
    assert result.settings["environment"] == "gym" and result.settings["scoring"] == "environment"


class Thinker(Adder):
    def answer(self, prompt, asked):
        self.read.append(prompt)
        return f"<think>hm</think>{super().answer(prompt, asked | {'seed': 1})}"


@pytest.mark.parametrize("thinking", ["kept", "dropped"])
def test_turns_read_earlier_thinking_or_not(folder, tmp_path, thinking):
    model = Thinker()
    model.read = []
    with toy_server(model) as url:
        keys = [f"environment.thinking={thinking}", f"server.url={url}", "limit=2"]
        lines = evaluate(config_of(folder, tmp_path, *SUMS, *keys))
    second = [prompt for prompt in model.read if "sum 1" in prompt]
    assert second and all(("hm" in prompt) == (thinking == "kept") for prompt in second)
    settings = parse_result_lines(lines)[0].settings
    assert settings["environment"] == "gym" + ", thinking=dropped" * (thinking == "dropped")
    rows = [json.loads(row) for row in (tmp_path / "toy/textworld.jsonl").read_text().splitlines()][1:]
    assert all("hm" in row["response"] for row in rows), "a response is all that was said"


def test_the_environment_of_a_checkpoint_is_that_of_its_training(folder, tmp_path, monkeypatch):
    run = tmp_path / "outputs/toy"
    write_tiny_model(run / "global_step_1/actor/huggingface")
    (run / "global_step_1" / MARKER).write_text("1\n")
    config = composed("explore", *SUMS, "environment.max_steps=3")
    OmegaConf.save(config, run / "global_step_1" / CONFIG_FILE, resolve=False)
    monkeypatch.chdir(tmp_path)
    plan = plan_of(config_of(folder, tmp_path))
    assert plan.environment.keys.class_path == f"{GAMES}.Sums" and plan.environment.keys.max_steps == 3
    assert f"environment=gym: {GAMES}.Sums, 3 actions a response" in plan.describe()
    (tmp_path / "gsm8k.jsonl").write_text('{"question": "What is 1 + 2?", "answer": "#### 3"}\n')
    others = plan_of(config_of(folder, tmp_path, "benchmark=gsm8k", f"files={tmp_path}/gsm8k.jsonl"))
    assert others.environment.name == "tools", "questions without tasks"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "scoring=environment needs environment=gym"),
        (["environment=none"], "environment=none: expected tools, chat or gym"),
        ([*SUMS, "environment.reward=task"], "scoring=environment needs environment=gym, with environment.reward"),
        ([*SUMS, "stop=[x]"], r"stop=\['x'\] with environment=gym"),
        ([*SUMS, ECHO], "tools=search with environment=gym"),
        ([*SUMS, "server.api=chat"], "server.api=chat with environment=gym"),
        (["environment=gym"], "environment.class_path=None, environment.url=None: expected exactly one"),
        ([*SUMS[:1], f"environment.class_path={GAMES}.NoStep"], "NoStep has no step"),
    ],
)
def test_keys_that_contradict_gym_are_refused_before_a_server_starts(folder, tmp_path, overrides, message):
    with pytest.raises(EvaluationError, match=message):
        plan_of(config_of(folder, tmp_path, "server.url=http://127.0.0.1:9", *overrides))
