"""Tests of all tasks that make their data: seeds decide it, wrong options are named, and evaluations can read it."""

import asyncio
import json
import random
from dataclasses import replace

import pytest

from recipe.tasks.countdown.data import CountdownConfig, write_countdown
from recipe.tasks.search.data import SearchTaskConfig, write_search_task
from recipe.tasks.walk.data import Problem, WalkConfig, random_walk, write_walks
from recipe.tasks.word_problems.data import WordProblemsConfig, write_word_problems
from tests.recipe.tasks.countdown.solver import solve
from tests.tables import table
from verl.evaluation.questions.loading import read_questions
from verl.evaluation.scores.scoring import find_scoring

WALK = WalkConfig(train_size=30, valid_size=0, demo_size=0, test_size=8)
COUNTDOWN = CountdownConfig(train_size=30, demo_size=0, test_size=8)
WORDS = WordProblemsConfig(train_size=30, valid_size=0, test_size=8)
SEARCH = SearchTaskConfig(people=20, train_size=30, test_size=20, demo_size=6)
MAKERS = {
    "countdown": (write_countdown, COUNTDOWN),
    "walk": (write_walks, WALK),
    "word_problems": (write_word_problems, WORDS),
    "search": (lambda folder, config: asyncio.run(write_search_task(folder, config)), SEARCH),
}


@pytest.mark.parametrize("task", MAKERS)
def test_the_same_seed_makes_the_same_rows_and_another_one_others(task, tmp_path):
    write, config = MAKERS[task]
    first, again, other = (
        write(tmp_path / name, replace(config, seed=seed)) for name, seed in (("a", 3), ("b", 3), ("c", 4))
    )
    assert all(first[split].read_bytes() == again[split].read_bytes() for split in first)
    assert first["train"].read_bytes() != other["train"].read_bytes()


@pytest.mark.parametrize(("task", "option", "value"), table(__file__, "wrong options"))
def test_wrong_options_are_named(task, option, value):
    with pytest.raises(ValueError, match=f"{option}="):
        replace(MAKERS[task][1], **{option: value})


def walked(truth: str) -> str:
    return random_walk(Problem(**json.loads(truth)), True, random.Random(0))


def solved(truth: str) -> str:
    problem = json.loads(truth)
    return f"<answer>{solve(problem['numbers'], problem['target'], '+-*/')}</answer>"


@pytest.mark.parametrize(
    ("task", "benchmark", "scoring", "right"),
    [
        ("countdown", "countdown", "countdown", solved),
        ("walk", "walk", "walk", walked),
        ("word_problems", "wordproblems", "number", lambda truth: f"So it is 2 + 2 = {truth}."),
    ],
)
def test_the_test_split_is_a_set_of_questions(task, benchmark, scoring, right, tmp_path):
    write, config = MAKERS[task]
    questions = read_questions(benchmark, [write(tmp_path, replace(config, train_size=0))["test"]]).questions
    score = find_scoring(scoring).score
    assert len(questions) == 8
    for question in questions:
        assert score(question, right(question.answers[0])).score == 1.0 > score(question, "0").score
