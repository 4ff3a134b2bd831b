"""The made task: questions that only the corpus answers, demonstrations that the tools really give."""

import asyncio
import json
import re

import pyarrow.parquet as pq
import pytest

from recipe.arpo.search_task import SearchTaskConfig, make_questions, make_world, write_search_task
from recipe.arpo.sft_data import messages_of
from verl.utils.reward_score import deep_research

CONFIG = SearchTaskConfig(people=20, train_size=100, test_size=20, demo_size=120, demo_correct=0.5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return asyncio.run(write_search_task(tmp_path_factory.mktemp("task"), CONFIG))


@pytest.fixture(scope="module")
def facts(folder):
    """name -> (pal, age), read from the corpus."""
    facts_of = {}
    for line in (folder / "corpus.jsonl").read_text().splitlines():
        row = json.loads(line)
        pal, age = re.fullmatch(rf"{row['title']}: pal (\w+), age (\d)", row["text"]).groups()
        facts_of[row["title"]] = pal, int(age)
    return facts_of


def answer(question: str, facts) -> int:
    name, other = re.fullmatch(r"(\w+) \+ (\w+)\?", question).groups()
    return facts[name][1] + facts[facts[name][0] if other == "pal" else other][1]


def test_the_corpus_answers_every_question(folder, facts):
    assert len(facts) == 20
    for split, size in (("train", 100), ("test", 20)):
        rows = pq.read_table(folder / f"{split}.parquet").to_pylist()
        assert len(rows) == size
        for row in rows:
            assert row["reward_model"]["ground_truth"] == str(answer(row["prompt"][0]["content"], facts))


def test_no_question_is_in_both(folder):
    train, test = (
        {row["prompt"][0]["content"] for row in pq.read_table(folder / f"{split}.parquet").to_pylist()}
        for split in ("train", "test")
    )
    assert not train & test and any("pal" in q for q in test) and any("pal" not in q for q in test)


def test_demonstrations_are_well_formed_and_half_of_them_right(folder, facts):
    right = 0
    for line in (folder / "demonstrations.jsonl").read_text().splitlines():
        row = json.loads(line)
        messages_of(row)
        question, *turns = [turn["value"] for turn in row["conversations"]]
        truth = str(answer(question, facts))
        reward = deep_research.compute_score("search_task", "".join(turns), truth, {"reward_rule": "em"})
        assert reward["format"] == 1
        right += reward["acc"]
        for call, result in zip(turns, turns[1:], strict=False):
            if asked := re.search(r"<search>(\w+)</search>", call):
                assert f"{asked[1]}: pal {facts[asked[1]][0]}, age {facts[asked[1]][1]}" in result
            if asked := re.search(r"<python>(\d)\+(\d)</python>", call):
                assert result == f"<result>{int(asked[1]) + int(asked[2])}</result>"
    assert 0.45 < right / CONFIG.demo_size < 0.72  # some of the wrong ones hit by chance


def test_seeds(tmp_path):
    assert make_world(CONFIG) == make_world(CONFIG)
    other = SearchTaskConfig(people=20, train_size=100, test_size=20, seed=1)
    assert make_world(other) != make_world(CONFIG)
    assert make_questions(make_world(other), other) == make_questions(make_world(other), other)


@pytest.mark.parametrize("change", [{"people": 3}, {"demo_correct": 1.5}, {"train_size": 0}])
def test_a_wrong_size_is_named(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        SearchTaskConfig(**change)
