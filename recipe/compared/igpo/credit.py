"""IGPO's credit (arXiv 2510.14967; `algorithm.adv_estimator=igpo`): what a turn adds to the likelihood of the answer.

    p_t   exp(mean log-probability of the reference answer's tokens) after turn t, p_0 after the prompt
    g_t   p_t - p_(t-1), the reward of every turn but the last
    R     the trajectory's outcome, the reward of the last turn

Gains are normalized over the same turn of the prompt's trajectories, and outcomes over its trajectories. A turn's
tokens get the sum of the rewards from it on, discounted by gamma for each turn between. A turn ends with a tool's
result; with tree=hato it is a step. A trajectory of one turn has its outcome alone. Before normalization, p .1, .4, .3
and R 1 make gains .3 and -.1, and sums 1.2, .9 and 1.

Differences from the published code: the sampling policy computes p (theirs scores all rows on the training engine at
each turn), for the most likely of several references (theirs: the first); the answer is tokenized with the text
before it, and turns are known by their tokens, not looked for in the text; tools' tokens are not trained; the rewards
are normalized and discounted as in the paper (theirs: the mean at the same token position is subtracted from
undiscounted sums).
"""

import numpy as np
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass

from verl.trainer.ppo.credit.nodes import SEGMENT_IDS, trajectory_advantages
from verl.utils.parts import Compares, register_credit
from verl.workers.config.keys import STRICT
from verl.workers.rollout.answer_likelihood import ANSWER_GAINS


@dataclass(frozen=True, config=STRICT)
class IGPOKeys:
    """Keys under algorithm.igpo.

    Args:
        gamma: discount of a later turn's reward.
        log_prob: whether gains are differences of mean log-probabilities in nats instead of probabilities.
    """

    gamma: float = Field(default=1.0, ge=0, le=1)
    log_prob: bool = False


def discounted_sums(rewards: list[float], gamma: float) -> list[float]:
    """Return for each turn the sum of its reward and the later ones, discounted by gamma for each turn between."""
    sums, later = [], 0.0
    for reward in reversed(rewards):
        later = reward + gamma * later
        sums.append(later)
    return sums[::-1]


@register_credit(
    "igpo",
    "IGPO (arXiv 2510.14967): each turn's gain of the reference answer's likelihood, and the outcome",
    requires="reference answers in reward_model.ground_truth, which the policy scores during the rollout",
    keys=IGPOKeys,
    compares=Compares.NODES,
    needs=(SEGMENT_IDS, ANSWER_GAINS),
)
def compute_igpo_advantage(
    rewards: torch.Tensor, mask: torch.Tensor, index: np.ndarray, epsilon: float, norm: bool, keys: IGPOKeys
) -> torch.Tensor:
    """Return the advantages (B, T), equal at all tokens of a turn and at the tool's result or the padding after it."""
    gains = ANSWER_GAINS.get()
    rows, ends = (~gains.isnan()).nonzero(as_tuple=True)
    outcomes = trajectory_advantages(rewards, index, epsilon, norm).tolist()
    # Number the turns within their row.
    firsts = torch.searchsorted(rows, rows)
    turns = (torch.arange(len(rows)) - firsts).tolist()
    same_turn = [(index[row], turn) for row, turn in zip(rows.tolist(), turns, strict=True)]
    numbers = {turn: number for number, turn in enumerate(dict.fromkeys(same_turn))}
    compared = np.array([numbers[turn] for turn in same_turn], dtype=int)
    normalized = trajectory_advantages(gains[rows, ends].unsqueeze(-1), compared, epsilon, norm)
    advantages = torch.zeros_like(rewards)
    n_turns = rows.bincount(minlength=len(outcomes)).tolist()
    columns = zip(normalized.split(n_turns), ends.split(n_turns), outcomes, strict=True)
    for row, (own, own_ends, outcome) in enumerate(columns):
        sums = discounted_sums([*own.tolist(), outcome], keys.gamma)
        begin = 0
        for end, value in zip([*own_ends.tolist(), mask.shape[1]], sums, strict=True):
            advantages[row, begin : end + 1] = value
            begin = end + 1
    return advantages
