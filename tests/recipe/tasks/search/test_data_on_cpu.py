"""The made task: questions that only the corpus answers, demonstrations that the tools really give."""

import asyncio
import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from recipe.arpo.sft_data import messages_of
from recipe.common.tiny_model import make_tokenizer
from recipe.tasks.deep_research import reward as deep_research
from recipe.tasks.search.data import EXTRA_WORDS, SearchTaskConfig, make_questions, make_world, write_search_task
from verl.utils.dataset.tool_sft_dataset import DemonstrationEncoder

ROOT = Path(__file__).resolve().parents[4]
CONFIG = SearchTaskConfig(people=20, train_size=100, test_size=20, demo_size=120, demo_correct=0.5)


@pytest.fixture(scope="module", params=[(2, 2), (3, 5)], ids=["2 hops", "3 to 5 hops"])
def config(request):
    return replace(CONFIG, min_hops=request.param[0], max_hops=request.param[1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory, config):
    return asyncio.run(write_search_task(tmp_path_factory.mktemp("task"), config))["corpus"].parent


@pytest.fixture(scope="module")
def facts(folder):
    """name -> (pal, age), read from the corpus."""
    facts_of = {}
    for line in (folder / "corpus.jsonl").read_text().splitlines():
        row = json.loads(line)
        pal, age = re.fullmatch(rf"{row['title']}: pal (\w+), age (\d)", row["text"]).groups()
        facts_of[row["title"]] = pal, int(age)
    return facts_of


def walk(question: str, facts) -> list[str]:
    """Whom to search for, by the question's text and the corpus; the answer adds the first and the last age."""
    name, first, *rest = re.findall(r"\w+", question)
    assert question == f"{name} + {' '.join([first, *rest])}?"
    asked = [name, facts[name][0] if first == "pal" else first]
    for word in rest:
        assert word == "pal"
        asked.append(facts[asked[-1]][0])
    return asked


def answer(question: str, facts) -> int:
    asked = walk(question, facts)
    return facts[asked[0]][1] + facts[asked[-1]][1]


def test_the_corpus_answers_every_question_by_its_hops_and_none_is_in_both_splits(folder, facts, config):
    assert len(facts) == 20
    questions, hops = {}, set()
    for split, size in (("train", 100), ("test", 20)):
        rows = pq.read_table(folder / f"{split}.parquet").to_pylist()
        assert len(rows) == size
        for row in rows:
            question = row["prompt"][0]["content"]
            assert row["reward_model"]["ground_truth"] == str(answer(question, facts))
            names = walk(question, facts)
            assert len(set(names)) == len(names)
            hops.add(len(names))
        questions[split] = {row["prompt"][0]["content"] for row in rows}
    assert not questions["train"] & questions["test"]
    assert {"+ pal" in question for question in questions["test"]} == {True, False}
    assert hops == set(range(config.min_hops, config.max_hops + 1))


def test_demonstrations_are_well_formed_and_half_of_them_right(folder, facts):
    right = complete = 0
    for line in (folder / "demonstrations.jsonl").read_text().splitlines():
        row = json.loads(line)
        messages_of(row)
        question, *turns = [turn["value"] for turn in row["conversations"]]
        truth = str(answer(question, facts))
        reward = deep_research.compute_score("search_task", "".join(turns), truth, {"reward_rule": "em"})
        assert reward["format"] == 1
        right += reward["acc"]
        searched = re.findall(r"<search>(\w+)</search>", "".join(turns))
        assert searched[0] == walk(question, facts)[0]
        complete += searched == walk(question, facts)
        for call, result in zip(turns, turns[1:], strict=False):
            if asked := re.search(r"<search>(\w+)</search>", call):
                assert f"{asked[1]}: pal {facts[asked[1]][0]}, age {facts[asked[1]][1]}" in result
            if asked := re.search(r"<python>(\d)\+(\d)</python>", call):
                assert result == f"<result>{int(asked[1]) + int(asked[2])}</result>"
    assert 0.45 < right / CONFIG.demo_size < 0.72  # some of the wrong ones hit by chance
    # the right ones, and those of the three kinds of wrong ones that only compute something else
    assert 0.5 < complete / CONFIG.demo_size < 0.85


@pytest.mark.parametrize("hops", ["2", "3", "3-5"])
def test_the_scripts_lengths_fit_in_tokens(tmp_path, hops):
    command = "source recipe/tasks/search/search_task.sh; use_hops $0; "
    command += "echo $MAX_PROMPT_LENGTH $MAX_RESPONSE_LENGTH $CALL_LIMIT"
    limits = subprocess.run(["bash", "-c", command, hops], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    prompt_limit, response_limit, call_limit = map(int, limits.split())
    low, high = int(hops[0]), int(hops[-1])
    asyncio.run(write_search_task(tmp_path, replace(CONFIG, min_hops=low, max_hops=high)))
    tokenizer = make_tokenizer(extra_words=EXTRA_WORDS)
    encoder = DemonstrationEncoder(tokenizer)
    prompts, responses, calls = [], [], []
    for line in (tmp_path / "demonstrations.jsonl").read_text().splitlines():
        question, *turns = messages_of(json.loads(line))
        prompt = tokenizer.apply_chat_template([question], add_generation_prompt=True, return_dict=False)
        prompts.append(len(prompt))
        responses.append(len(encoder.encode([question, *turns])[0]) - len(prompt))
        calls.append(sum(turn["role"] == "tool" for turn in turns))
    assert max(prompts) <= prompt_limit and max(calls) == call_limit
    a_search_with_its_result = 26
    assert max(responses) + 2 * a_search_with_its_result <= response_limit


@pytest.mark.parametrize("hops", ["1", "10", "5-3", "3-", "three", ""])
def test_a_wrong_hops_is_named(hops):
    command = ["bash", "-c", 'source recipe/tasks/search/search_task.sh; use_hops "$0"', hops]
    failed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert failed.returncode == 2 and f"HOPS={hops}:" in failed.stderr


@pytest.mark.parametrize("change", [{"max_hops": 19}, {"people": 4, "test_size": 64}])
def test_a_world_with_too_few_questions_is_named(change):
    config = replace(CONFIG, **change)
    with pytest.raises(ValueError, match=f"^{next(iter(change))}="):
        make_questions(make_world(config), config)
