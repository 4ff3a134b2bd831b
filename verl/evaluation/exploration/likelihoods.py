"""Measures how well the reference answer's likelihood predicts early which responses end right, for scripts/explore.sh.

The measure is the AUC: of a right and a wrong response to a prompt, both cut at the same share of their length, how
often has the right one the higher likelihood? 0.5 is chance. Two controls are measured in the same way: the likelihood
of a wrong answer, and the likelihood of the response's beginning itself.
"""

from collections.abc import Mapping, Sequence
from itertools import product
from statistics import fmean
from typing import Any

from tqdm import tqdm

from verl.evaluation.exploration.table import SampledGroup, Trajectory
from verl.evaluation.scores.metrics import with_interval
from verl.workers.rollout.answer_likelihood import AnswerLikelihood, reference_answers
from verl.workers.rollout.engines.interface import RolloutEngine, gather_or_cancel

SHARES = (0.25, 0.5, 0.75)
# Names of the likelihoods that are compared between responses.
SIGNALS = ("reference", "wrong answer", "beginning")
# An AUC below this is too weak to guide a search.
USEFUL = 0.65


def references_by_prompt(rows: Sequence[Mapping]) -> list[tuple[list[str], list[str]]] | None:
    """Pair each row's reference answers with those of another row, used as wrong answers; None if any row lacks
    references or all rows share them."""
    try:
        answers = [reference_answers(row) for row in rows]
    except ValueError:
        return None
    pairs = []
    for number, own in enumerate(answers):
        others = (answers[(number + step) % len(answers)] for step in range(1, len(answers)))
        wrong = next((other for other in others if not {*other} & {*own}), None)
        if wrong is None:
            return None
        pairs.append((own, wrong))
    return pairs


def auc(right: Sequence[float], wrong: Sequence[float]) -> float:
    """Return the share of pairs in which the number of `right` exceeds that of `wrong`; equal numbers count half."""
    return fmean((high > low) + (high == low) / 2 for high, low in product(right, wrong))


async def likelihood_rows(
    engine: RolloutEngine,
    tokenizer,
    closing: str,
    groups: Sequence[SampledGroup],
    references: Sequence[tuple[list[str], list[str]]],
    bar: tqdm,
) -> list[dict[str, Any]]:
    """Return a row for each of SHARES (25, 50, 75 %), or no rows if no group has both right and wrong responses.

    A row has the `share` of the response that is read; `groups`, the number of groups with both; and for each signal s
    of SIGNALS its mean AUC in these groups, named s, with the ends `s-Low` and `s-High` of a 95 % bootstrap interval.
    `closing` stands between the response's beginning and the answer (`closing_text`); `references` are the prompts'
    answers from `references_by_prompt`.
    """
    mixed = [
        (group, answers)
        for group, answers in zip(groups, references, strict=True)
        if len({trajectory.right for trajectory in group.trajectories}) == 2
    ]
    if not mixed:
        return []
    rows = []
    bar.total += len(SHARES) * len(mixed)
    for share in SHARES:
        jobs = (_group_aucs(bar, engine, tokenizer, closing, group, answers, share) for group, answers in mixed)
        aucs = await gather_or_cancel(*jobs)
        row: dict[str, Any] = {"share": share, "groups": len(mixed)}
        for signal, values in zip(SIGNALS, zip(*aucs, strict=True), strict=True):
            row |= with_interval(signal, values)
        rows.append(row)
    return rows


async def _group_aucs(
    bar: tqdm, engine, tokenizer, closing: str, group: SampledGroup, answers, share: float
) -> list[float]:
    both = [AnswerLikelihood(engine.score, tokenizer, closing, each) for each in answers]

    async def signals(trajectory: Trajectory) -> list[float]:
        cut = max(1, int(share * len(trajectory.tokens)))
        beginning, steps = list(trajectory.tokens[:cut]), trajectory.steps[:cut]
        likelihoods = [await likelihood.log_prob([*group.prompt_ids, *beginning]) for likelihood in both]
        log_probs = await engine.score(group.prompt_ids, beginning)
        by_model = [value for value, step in zip(log_probs, steps, strict=True) if step is not None]
        return [*likelihoods, fmean(by_model) if by_model else 0.0]

    signal_rows = await gather_or_cancel(*(signals(trajectory) for trajectory in group.trajectories))
    rights = [trajectory.right for trajectory in group.trajectories]
    columns = zip(*signal_rows, strict=True)
    bar.update()
    return [
        auc(
            [value for value, right in zip(column, rights, strict=True) if right],
            [value for value, right in zip(column, rights, strict=True) if not right],
        )
        for column in columns
    ]
