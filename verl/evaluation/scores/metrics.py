"""Accuracy over several samples of a question, with bootstrap intervals over questions.

A metric @k is the expected value over all draws of k from the n samples of a question, without replacement. Pass@k and
Best@k are computed exactly, and so is Maj@k where there are at most DRAWS draws; otherwise it is estimated from DRAWS
random ones. The intervals show the uncertainty from the choice of questions. In this example the 4 samples of a
question answer 7, 7, 8 and nothing, and 7 is right:

    Pass@1 = Mean@4 = 2/4    Pass@2 = Best@2 = 1 - C(2,2)/C(4,2) = 5/6
    Maj@2 = 4/6 = (77: 1, twice 78: 1/2 each, twice 7-: 1, 8-: 0) / 6
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

import numpy as np

from verl.evaluation.scores.results import INTERVAL_ENDS

DRAWS = 1000  # largest number of draws for Maj@k; the estimate's standard error is at most 0.5 / sqrt(DRAWS) = 0.016


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the chance that one or more of k samples are right, if c of n are: 1 - C(n-c, k) / C(n, k), unbiased.

    This is equation 1 of Chen et al. 2021 (arXiv 2107.03374), for 1 <= k <= n. Integers keep all digits for large n.

    >>> pass_at_k(4, 2, 2)
    0.8333333333333334
    """
    draws = math.comb(n, k)
    return (draws - math.comb(n - c, k)) / draws


def best_at_k(scores: Sequence[float], k: int) -> float:
    """Return the expected best score of k samples; it equals `pass_at_k` if all scores are 0 or 1.

    The i-th smallest of n scores is the best of C(i-1, k-1) of the C(n, k) draws.

    >>> best_at_k([0.0, 0.5, 1.0], 2)  # (0.5 + 1 + 1) / 3
    0.8333333333333333
    """
    draws = math.comb(len(scores), k)
    return math.fsum(float(score) * (math.comb(i, k - 1) / draws) for i, score in enumerate(sorted(scores)))


def maj_at_k(
    scores: Sequence[float], answers: Sequence[str | None], k: int, *, n_draws: int = DRAWS, seed: int = 0
) -> float:
    """Return the expected score of the most frequent answer of k samples, over all draws if they are at most `n_draws`,
    else estimated from `n_draws` random ones.

    A None or empty answer does not vote. Answers with equally many votes win equally often. A draw without votes scores
    0. If samples with the same answer have different scores, the answer has their mean.

    >>> maj_at_k([1, 1, 0, 0], ["7", "7", "8", None], 4)
    1.0
    """
    kinds = sorted({answer for answer in answers if answer})
    if not kinds:
        return 0.0
    gives = np.array([[answer == kind for kind in kinds] for answer in answers], dtype=int)  # (samples, kinds)
    kind_scores = np.asarray(scores, dtype=float) @ gives / gives.sum(axis=0)
    n = len(answers)
    if math.comb(n, k) <= n_draws:
        drawn = np.array([np.isin(range(n), chosen) for chosen in itertools.combinations(range(n), k)])
    else:
        drawn = np.random.default_rng(seed).random((n_draws, n)).argsort(axis=1) < k
    votes = drawn @ gives  # (draws, kinds)
    wins = (votes == votes.max(axis=1, keepdims=True)) & (votes > 0)
    return float(np.mean(wins @ kind_scores / np.maximum(wins.sum(axis=1), 1)))


def bootstrap_interval(
    values: Sequence[float], *, confidence: float = 0.95, n_resamples: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """Return both ends of the percentile bootstrap interval of the mean of values, one for each question."""
    array, generator = np.asarray(values, dtype=float), np.random.default_rng(seed)
    means = [array[generator.integers(len(array), size=len(array))].mean() for _ in range(n_resamples)]
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def with_interval(name: str, values: Sequence[float]) -> dict[str, float]:
    """Return the mean of a number's values for all questions, and the ends of its bootstrap interval."""
    ends = zip(INTERVAL_ENDS, bootstrap_interval(values), strict=True)
    return {name: fmean(values)} | {name + end: value for end, value in ends}


def measure(samples: Iterable[Mapping], ks: Sequence[int]) -> dict[str, float]:
    """Return all metrics of a data set by name. Every question has the same weight, however many samples it has.

    They are `Acc-Pass@k` (also for k = 1; a score of 1 is right), `Acc-Mean@k` for the largest k (the mean of all
    samples), `Acc-Best@k`, `Acc-Maj@k`, `Response-Length-Mean` in tokens, `Tool-Calls-Mean` if a sample has tools,
    `Unscored-Share` if a sample has no score, `Cut-Share` if it is known which responses a limit of tokens or calls has
    ended, `Lost-Share` if a question did not fit or an environment has lost a sample, `F1-Mean` if a sample has an F1,
    and `Reward-Mean` with an environment's rewards. Accuracies and F1 also have the ends of their intervals, named with
    the endings of `INTERVAL_ENDS`. Accuracies leave out samples without a score, and metrics @k questions with fewer
    than k scores.

    Samples have `question` (its id), `score` (in [0, 1] or None), `answer` (the vote: equal answers are equal text),
    `tokens`, `tool_calls` (None if the model has no tools) and perhaps `f1`, `cut`, `reward`, and `lost`.
    """
    by_question = defaultdict(list)
    for sample in samples:
        by_question[sample["question"]].append(sample)
    questions, most = list(by_question.values()), max(ks)
    scored = [[sample for sample in group if sample["score"] is not None] for group in questions]
    if most > (longest := max(map(len, scored), default=0)):
        raise ValueError(f"k={most}: no question has so many samples with a score; the most are {longest}")
    scores = [[sample["score"] for sample in group] for group in scored]
    votes = [[sample["answer"] for sample in group] for group in scored]
    values = {}
    for k in sorted({1, *ks}):
        values[f"Acc-Pass@{k}"] = [pass_at_k(len(s), sum(x >= 1 for x in s), k) for s in scores if len(s) >= k]
    values[f"Acc-Mean@{most}"] = [fmean(s) for s in scores if len(s) >= most]
    for k in sorted({*ks}):
        values[f"Acc-Best@{k}"] = [best_at_k(s, k) for s in scores if len(s) >= k]
    for k in sorted({*ks}):
        pairs = enumerate(zip(scores, votes, strict=True))
        values[f"Acc-Maj@{k}"] = [maj_at_k(s, answers, k, seed=i) for i, (s, answers) in pairs if len(s) >= k]
    values |= _other_values(questions)
    numbers = {name: fmean(question_values) for name, question_values in values.items()}
    for name in values:
        if name.startswith(("Acc-", "F1-")):
            numbers |= with_interval(name, values[name])
    return numbers


def _other_values(questions: list[list[Mapping]]) -> dict[str, list[float]]:
    """Return the metrics other than accuracies: name -> a value for each question."""
    values = {"Response-Length-Mean": [fmean(sample["tokens"] for sample in group) for group in questions]}
    for name, key in (("Tool-Calls-Mean", "tool_calls"), ("Cut-Share", "cut")):
        groups = [[sample[key] for sample in group if sample.get(key) is not None] for group in questions]
        if any(groups):
            values[name] = [fmean(group) for group in groups if group]
    unscored = [fmean(sample["score"] is None for sample in group) for group in questions]
    if any(unscored):
        values["Unscored-Share"] = unscored
    for name, key in (("F1-Mean", "f1"), ("Reward-Mean", "reward")):
        if any(key in sample for group in questions for sample in group):
            values[name] = [fmean(sample.get(key, 0.0) for sample in group) for group in questions]
    if any("lost" in sample for group in questions for sample in group):
        values["Lost-Share"] = [fmean("lost" in sample for sample in group) for group in questions]
    return values
