"""The metrics against enumeration of all subsets, and the intervals against a distribution that is known."""

import itertools
import math
import random
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from verl.evaluation.scores.metrics import best_at_k, bootstrap_interval, maj_at_k, measure, pass_at_k


def over_all_subsets(samples: list, k: int, value) -> float:
    """The mean of `value(subset)` over all subsets of size k, as exact fractions."""
    subsets = list(itertools.combinations(samples, k))
    return float(sum((Fraction(value(subset)) for subset in subsets), Fraction()) / len(subsets))


def majority(subset) -> Fraction:
    """Score of the answer with most votes, the mean where several have; the plain way."""
    votes = Counter(answer for answer, _ in subset if answer)
    winners = [answer for answer, count in votes.items() if count == max(votes.values())]
    return Fraction(sum(dict(subset)[answer] for answer in winners), len(winners)) if winners else Fraction()


def random_votes(generator: random.Random, n: int) -> list[tuple[str | None, int]]:
    """n (answer, score): few or many different answers, some none; an answer always has the same score."""
    kinds = generator.randint(1, n)
    scores = {answer: generator.randint(0, 1) for answer in "abcdefghij"[:kinds]}
    silent = generator.choice([0.0, 0.3, 1.0]) * generator.random()
    answers = [None if generator.random() < silent else generator.choice(list(scores)) for _ in range(n)]
    return [(answer, scores.get(answer, 0)) for answer in answers]


def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample():
    for n in range(1, 10):
        for c, k in itertools.product(range(n + 1), range(1, n + 1)):
            samples = [1] * c + [0] * (n - c)
            assert pass_at_k(n, c, k) == over_all_subsets(samples, k, max), (n, c, k)


def test_pass_at_k_of_many_samples():
    # numbers that a naive formula rounds (1 - 1e-17 to 1) or lets overflow
    assert pass_at_k(10**6, 1, 1) == 1e-6
    assert pass_at_k(200, 1, 100) == 0.5
    assert pass_at_k(10_000, 5_000, 5_001) == 1.0
    assert pass_at_k(1000, 2, 500) == pytest.approx(1 - (500 * 499) / (1000 * 999), rel=1e-15)


def test_best_at_k_is_the_mean_over_all_subsets():
    generator = random.Random(0)
    for _ in range(200):
        n = generator.randint(1, 9)
        scores = [generator.choice([0.0, 0.25, 0.5, 1.0, generator.random()]) for _ in range(n)]
        k = generator.randint(1, n)
        assert best_at_k(scores, k) == pytest.approx(over_all_subsets(scores, k, max), rel=1e-14)


def test_maj_at_k_is_the_mean_over_all_subsets_where_they_are_few():
    generator = random.Random(1)
    for trial in range(100):
        votes = random_votes(generator, generator.randint(1, 10))
        k = generator.randint(1, len(votes))
        result = maj_at_k([score for _, score in votes], [answer for answer, _ in votes], k, seed=trial)
        assert result == pytest.approx(over_all_subsets(votes, k, majority), rel=1e-12)
    assert maj_at_k([1, 0], ["7", "7"], 1) == 1 / 2, "one answer, two scores: their mean"
    assert maj_at_k([1, 0, 0, 0, 0], ["7", "8", "9", "10", "11"], 1) == pytest.approx(0.2, rel=1e-14)


def test_maj_at_k_estimates_the_mean_over_many_subsets():
    """The standard error is at most 0.5 / sqrt(200) for a question, and a 20th of it for the mean of 400 questions."""
    generator, errors = random.Random(1), []
    for trial in range(400):
        votes = random_votes(generator, 10)
        k = generator.randint(4, 6)  # 210 or 252 subsets
        options = {"seed": trial, "n_draws": 200}
        result = maj_at_k([score for _, score in votes], [answer for answer, _ in votes], k, **options)
        errors.append(result - over_all_subsets(votes, k, majority))
    assert max(map(abs, errors)) < 4 * 0.5 / math.sqrt(200)
    assert abs(sum(errors)) / 400 < 3 * 0.5 / math.sqrt(200 * 400)


def test_intervals_hold_the_true_mean_as_often_as_they_say():
    """Questions whose accuracy is a quarter of the time 1, else uniform: mean 0.625; 300 sets of 150 questions."""
    generator = np.random.default_rng(0)
    inside = 0
    for trial in range(300):
        values = np.where(generator.random(150) < 0.25, 1.0, generator.random(150))
        low, high = bootstrap_interval(values, n_resamples=600, seed=trial)
        inside += low <= 0.625 <= high
    assert 0.92 <= inside / 300 <= 0.98


def sample(question: str, score, answer, tokens: int = 1, tool_calls: int | None = None, **more) -> dict:
    row = {"question": question, "score": score, "answer": answer, "tokens": tokens, "tool_calls": tool_calls}
    return row | more


def without_intervals(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.endswith(("-Low", "-High"))}


def test_all_metrics_by_hand():
    result = measure(
        [
            *[sample("one", 1, "7", 10, 2), sample("two", 0, "8", 4, 0), sample("one", True, "7", 20, 1)],
            *[sample("one", False, "8", 30, 0), sample("one", 0.0, None, 40, 1), sample("two", 0, None, 4, 0)],
            *[sample("two", 0, "9", 4, 0), sample("two", 1, "1", 4, 0)],
        ],
        ks=(2, 4),
    )
    assert without_intervals(result) == {
        "Acc-Pass@1": pytest.approx((2 / 4 + 1 / 4) / 2),
        "Acc-Pass@2": pytest.approx((5 / 6 + 3 / 6) / 2),
        "Acc-Pass@4": 1.0,
        "Acc-Mean@4": pytest.approx((2 / 4 + 1 / 4) / 2),
        "Acc-Best@2": pytest.approx((5 / 6 + 3 / 6) / 2),
        "Acc-Best@4": pytest.approx(1.0),
        # two: of 6 pairs 8-, 9-, 89 have no right vote, 1- is right, 18 and 19 are ties
        "Acc-Maj@2": pytest.approx((4 / 6 + (1 + 1 / 2 + 1 / 2) / 6) / 2, abs=4 * 0.5 / math.sqrt(2 * 1000)),
        "Acc-Maj@4": pytest.approx((1 + 1 / 3) / 2),
        "Response-Length-Mean": pytest.approx((25 + 4) / 2),
        "Tool-Calls-Mean": pytest.approx((1 + 0) / 2),
    }
    accuracies = [name for name in without_intervals(result) if name.startswith("Acc-")]
    assert len(result) == 10 + 2 * len(accuracies)
    assert all(result[f"{name}-Low"] <= result[name] <= result[f"{name}-High"] for name in accuracies)
    # two questions: the resamples are both, the first twice and the second twice
    assert (result["Acc-Pass@1-Low"], result["Acc-Pass@1-High"]) == (1 / 4, 2 / 4)


def test_f1_is_the_mean_over_questions_and_no_answer_has_none():
    samples = [sample("one", 0, "a", f1=0.5), sample("one", 0, None), sample("two", 1, "b", f1=1.0)]
    result = measure(samples, ks=(1,))
    assert (result["F1-Mean"], result["F1-Mean-Low"], result["F1-Mean-High"]) == (0.625, 0.25, 1.0)
    assert measure(list(reversed(samples)), ks=(1,))["F1-Mean"] == 0.625


def test_samples_without_a_score_are_counted_not_guessed():
    samples = [sample("one", None, "a"), sample("one", 1, "a"), sample("two", 0, "a"), sample("two", 1, "b")]
    result = measure(samples, ks=(1, 2))
    assert result["Acc-Pass@1"] == pytest.approx((1 + 1 / 2) / 2)
    assert result["Acc-Pass@2"] == 1.0  # the second question alone has two scores
    assert result["Unscored-Share"] == pytest.approx(1 / 4)
    with pytest.raises(ValueError, match="k=3: no question has so many samples with a score; the most are 2"):
        measure([sample("two", 0, "a"), sample("two", 1, "b")], ks=(3,))
