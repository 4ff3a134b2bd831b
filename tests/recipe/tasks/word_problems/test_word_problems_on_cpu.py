"""Word problems against answers by hand, and against a search for them in the numbers of the English text."""

import operator
import random
import re
import time

import pandas as pd
import pytest

from recipe.tasks.word_problems.data import (
    INSTRUCTION,
    MEN,
    STORIES,
    WOMEN,
    Problem,
    WordProblemsConfig,
    answer,
    content_of,
    draw_problems,
    text_of,
)
from recipe.tasks.word_problems.data import write_word_problems as write
from recipe.tasks.word_problems.reward import check_row, compute_score
from tests.tables import table

CONFIG = WordProblemsConfig(train_size=600, valid_size=60, test_size=90, seed=3)
PARTS = ("openings", "changes", "endings")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return {split: pd.read_parquet(path) for split, path in write(tmp_path_factory.mktemp("p"), CONFIG).items()}


def questions(frame) -> list[str]:
    return [prompt[0]["content"].removesuffix(f"\n\n{INSTRUCTION}") for prompt in frame["prompt"]]


def truths(frame) -> list[str]:
    return [row["ground_truth"] for row in frame["reward_model"]]


def reachable(numbers: list[int]) -> set[float]:
    """Return every result of the numbers in reading order, with any operation between two of them."""
    values = {float(numbers[0])}
    for number in numbers[1:]:
        steps = (operator.add, operator.sub, operator.mul, operator.truediv)
        values = {step(value, number) for value in values for step in steps}
    return values


def test_every_problem_has_its_operations_and_an_answer_that_its_numbers_make(written):
    counts = written["train"]["extra_info"].map(lambda info: info["operations"]).value_counts()
    assert counts.to_dict() == {1: 200, 2: 200, 3: 200}
    for frame in written.values():
        for question, truth, info in zip(questions(frame), truths(frame), frame["extra_info"], strict=True):
            numbers = [int(number) for number in re.findall(r"\d+", question)]
            assert len(numbers) == info["operations"] + 1 and 1 <= int(truth) <= CONFIG.max_value, question
            assert float(truth) in reachable(numbers) and int(truth) not in numbers, question
            assert question.endswith("?") and not set(question) & set("{}")
            assert compute_score("word_problems", f"It is {truth}.", truth)["acc"] == 1.0


def test_no_problem_is_in_two_splits_by_other_names(written):
    words = {*WOMEN, *MEN, "he", "she", "his", "her", "him", *(t for story in STORIES.values() for t in story.things)}
    skeletons = {
        split: [" ".join(w for w in re.findall(r"\w+", question) if w.lower() not in {x.lower() for x in words})
                for question in questions(frame)]
        for split, frame in written.items()
    }  # fmt: skip
    for split, skeleton in skeletons.items():
        assert len(skeleton) == len(set(skeleton)) == getattr(CONFIG, f"{split}_size")
    assert not set(skeletons["train"]) & set(skeletons["test"])
    assert not set(skeletons["train"]) & set(skeletons["valid"])
    assert not set(skeletons["valid"]) & set(skeletons["test"])


def test_no_problem_is_in_two_splits_in_other_sentences(tmp_path):
    """Numbers up to 10 and a single operation give many problems the same content."""
    config = WordProblemsConfig(train_size=300, valid_size=20, test_size=30, max_operations=1, max_number=10)
    contents = {
        split: {content_of(problem) for problem in draw_problems(config, split, random.Random(0))}
        for split in ("train", "valid", "test")
    }
    assert len(contents["train"]) < 300
    assert not contents["train"] & (contents["valid"] | contents["test"]) and not contents["valid"] & contents["test"]


def line(story: str, part: str, text: str) -> tuple[str, str]:
    """The only line of a story's part with these words."""
    (match,) = [line for line in getattr(STORIES[story], part) if text in line[0]]
    return match


@pytest.mark.parametrize(("story", "texts", "numbers", "words", "expected"), table(__file__, "answers by hand"))
def test_answers_by_hand(story, texts, numbers, words, expected):
    lines = tuple(line(story, part, text) for part, text in zip(PARTS, texts, strict=True))
    problem = Problem(story, lines, numbers)
    assert answer(problem) == expected
    assert re.search(words, text_of(problem, random.Random(0)))


@pytest.mark.parametrize("numbers", [(7, 3, 2, 5), (3, 2, 9, 4)])
def test_no_answer_by_fractions_or_debts(numbers):
    lines = tuple(line("farm", part, text) for part, text in zip(PARTS, ("Monday", "uses", "boxes"), strict=True))
    assert answer(Problem("farm", lines, numbers)) is None


def test_difficulty_by_config(tmp_path):
    config = WordProblemsConfig(
        train_size=50, valid_size=0, test_size=0, max_operations=1, operators="+-", max_number=9, max_value=18
    )
    (path,) = write(tmp_path, config).values()
    for question in questions(pd.read_parquet(path)):
        assert len(numbers := re.findall(r"\d+", question)) == 2 and max(map(int, numbers)) <= 9


def right(response, truth="24") -> float:
    return compute_score("word_problems", response, truth)["acc"]


@pytest.mark.parametrize(("response", "truth", "expected"), table(__file__, "verdicts"))
def test_verdicts(response, truth, expected):
    assert right(response, truth) == expected


def test_a_truth_may_be_a_number():
    assert [right("ans 22", 1e22), right("ans 22", 22), right("so 0.1", 0.1)] == [0, 1, 1]


def test_equal_answers_vote_together():
    votes = [compute_score("x", text, "1")["pred"] for text in ("24.0", "so 24", r"\boxed{48/2}", "none", "7")]
    assert votes == ["24", "24", "24", "", "7"]


@pytest.mark.parametrize(
    "text", ["1", "1,", "1,111", "111,", r"\frac{1", "1{,}", ".1", "1/", "-", "1.", r"\boxed{", "{1", "1 "]
)
def test_long_responses_are_scored_at_once(text):
    start = time.process_time()
    right(text * (200_000 // len(text)))
    assert time.process_time() - start < 1


@pytest.mark.parametrize("truth", ["", " ", "none", [4], {"target": [4]}, None, "1/0", True])
def test_a_row_is_refused_before_a_run_as_it_is_by_the_reward(truth):
    for refuse in (lambda: check_row("sums", truth), lambda: compute_score("sums", "4", truth)):
        with pytest.raises(ValueError, match="ground_truth of a sums problem must be a number"):
            refuse()
    for good in (4, 4.5, "1,000", "3/4"):
        check_row("sums", good)
