"""Data of reasoning-gym: splits share no question, settings reach the library, and demonstrations are partly right."""

import json
import math
import re
from dataclasses import replace

import pyarrow.parquet as pq
import pytest

from recipe.tasks.reasoning_gym.data import ReasoningGymConfig, write_reasoning_gym

SMALL = ReasoningGymConfig(train_size=60, test_size=20, demo_size=40)


def test_no_test_question_is_in_another_file(tmp_path):
    # 200 questions at most: train would have some of the test's
    config = replace(SMALL, family_config="chain_sum: {min_terms: 2, max_terms: 2, max_digits: 1}", demo_size=400)
    rows = {split: pq.read_table(path).to_pylist() for split, path in write_reasoning_gym(tmp_path, config).items()}
    asked = {split: [row["prompt"][0]["content"] for row in rows[split]] for split in ("train", "test")}
    shown = {row["messages"][0]["content"] for row in rows["sft"]}
    assert len(set(asked["test"])) == 20 and len(set(asked["train"])) == 60
    assert not set(asked["test"]) & (set(asked["train"]) | shown)


def test_families_take_turns_with_their_settings(tmp_path):
    config = replace(
        SMALL, families="gcd, chain_sum", family_config="chain_sum: {min_terms: 3, max_terms: 3}", style="long"
    )
    rows = pq.read_table(write_reasoning_gym(tmp_path, config)["train"]).to_pylist()
    truths = [json.loads(row["reward_model"]["ground_truth"]) for row in rows]
    assert [truth["family"] for truth in truths] == ["gcd", "chain_sum"] * 30
    assert all(truth["metadata"]["num_terms"] == 3 for truth in truths[1::2])
    assert all("<answer>" in row["prompt"][0]["content"] for row in rows)


@pytest.mark.parametrize(("correct", "low", "high"), [(1.0, 1.0, 1.0), (0.0, 0.0, 0.2), (0.5, 0.4, 0.6)])
def test_share_of_right_lines(correct, low, high, tmp_path):
    path = write_reasoning_gym(tmp_path, replace(SMALL, demo_correct=correct, demo_size=200))["sft"]
    texts = [row["messages"][1]["content"] for row in pq.read_table(path).to_pylist()]
    lines = [re.findall(r"(-?\d+)([-+]\d+)=(-?\d+)", text) for text in texts]
    right = [int(a) + int(b) == int(c) for text in lines for a, b, c in text]
    assert low <= sum(right) / len(right) <= high
    assert all(text.endswith(f"<answer>{line[-1][2]}</answer>") for text, line in zip(texts, lines, strict=True))


def test_answers_of_other_problems_are_the_wrong_demonstrations(tmp_path):
    config = replace(SMALL, families="gcd", family_config="", demo_correct=0.0, demo_size=200)
    right = 0
    for row in pq.read_table(write_reasoning_gym(tmp_path, config)["sft"]).to_pylist():
        question, answer = (message["content"] for message in row["messages"])
        right += answer == f"<answer>{math.gcd(*map(int, re.findall(r'[0-9]+', question)))}</answer>"
    assert 0 < right < 150  # two problems may have the same answer


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("families", "chain_sm", "did you mean chain_sum"),
        ("families", "gcd,gcd", "named twice"),
        ("family_config", "chain_sum: 3", "family_config="),
        ("family_config", "chain_sum: {terms: 3}", "family_config: chain_sum.*terms"),
        ("demo_correct", 1.5, "demo_correct="),
        ("test_size", -1, "test_size="),
        ("style", "loud", "style="),
    ],
)
def test_wrong_options_are_named(option, value, message):
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **{option: value})


def test_demonstrations_need_answers(tmp_path):
    with pytest.raises(ValueError, match="rush_hour has no answers"):
        write_reasoning_gym(tmp_path, replace(SMALL, families="rush_hour"))
