"""Exact match and F1 against numbers worked out by hand, and against hostile answers with a clock."""

import json
import random
import time
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from tests.tables import table
from verl.utils.reward_score.qa import check_row, compute_score, exact_match, gold_answers, plain_text, token_f1

ROWS = Path(__file__).with_name("qa_answers.txt").read_text(encoding="utf-8").splitlines()[1:]


@pytest.mark.parametrize("row", ROWS)
def test_by_hand(row):
    answer, golds, em, f1, *_ = row.split(" | ")
    assert exact_match(answer, json.loads(golds)) == int(em)
    assert token_f1(answer, json.loads(golds)) == pytest.approx(float(Fraction(f1.removesuffix(" |"))))


@pytest.mark.parametrize(
    ("truth", "golds"),
    [
        ("Paris", ["Paris"]),
        (["Paris", "Lutetia"], ["Paris", "Lutetia"]),
        (("Paris",), ["Paris"]),
        ('["Paris", "Lutetia"]', ["Paris", "Lutetia"]),
        (np.array(["Paris", "Lutetia"], dtype=object), ["Paris", "Lutetia"]),
        ("[0, 1)", ["[0, 1)"]),  # no JSON: a text
        (1912, ["1912"]),
        ([1912, "in 1912"], ["1912", "in 1912"]),
    ],
)
def test_gold_answers(truth, golds):
    assert gold_answers(truth) == golds


@pytest.mark.parametrize(("boxed", "text"), table(__file__, "boxed"))
def test_boxed_text(boxed, text):
    assert plain_text(boxed) == text


def test_compute_score():
    assert compute_score("nq", "The Obama", ["Barack Obama"]) == pytest.approx(
        {"score": 2 / 3, "acc": 0.0, "f1": 2 / 3, "pred": "obama"}
    )
    assert compute_score("nq", "The Obama", ["Barack Obama"], metric="em")["score"] == 0.0
    assert compute_score("nq", None, "x") == {"score": 0.0, "acc": 0.0, "f1": 0.0, "pred": ""}
    with pytest.raises(ValueError, match="metric='bleu'"):
        compute_score("nq", "x", "x", metric="bleu")


def test_f1_of_random_words_is_symmetric_bounded_and_blind_to_order():
    rng = random.Random(0)
    for _ in range(2000):
        answer, gold = (rng.choices("bcdef", k=rng.randrange(1, 6)) for _ in range(2))
        value = token_f1(" ".join(answer), [" ".join(gold)])
        common = sum(min(answer.count(word), gold.count(word)) for word in set(answer))
        precision, recall = common / len(answer), common / len(gold)
        by_definition = 2 * precision * recall / (precision + recall) if common else 0.0
        assert value == pytest.approx(by_definition)
        shuffled = rng.sample(answer, len(answer))
        assert token_f1(" ".join(gold), [" ".join(shuffled)]) == pytest.approx(value)


@pytest.mark.parametrize(
    "answer",
    ["<" * 1_000_000, "a " * 4096, "{" * 4000, r"\text{" * 1_000_000, "\x00" * 4096, "\ud800" * 4096, "," * 4096],
)
def test_hostile_answers(answer):
    start = time.process_time()
    result = compute_score("nq", plain_text(answer), ["Paris", "London"])
    assert time.process_time() - start < 0.5
    assert result["score"] == result["acc"] == 0.0


@pytest.mark.parametrize("truth", [None, "", " ", [], "[]", ["Paris", ""], [None], {"target": "Paris"}, [["Paris"]]])
def test_a_row_is_refused_before_a_run_as_it_is_by_the_reward(truth):
    for refuse in (lambda: check_row("qa", truth), lambda: compute_score("qa", "Paris", truth)):
        with pytest.raises(ValueError, match="ground_truth"):
            refuse()
    with pytest.raises(ValueError, match="metric='bleu'"):
        check_row("qa", "Paris", metric="bleu")
    check_row("qa", ["Paris", 3], None, metric="em")
