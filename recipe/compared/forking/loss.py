"""The 80/20 rule (arXiv 2506.01939), `loss=forking`: only the tokens of the highest entropy are trained.

A token is kept if its entropy is at least the (1 - rho) quantile of all response tokens of the step. The advantages of
the other tokens become 0, and a registered loss computes the rest, so that its own clip, keys and fields stay:

    loss=forking                                                                     around vanilla
    loss=hapo actor.policy_loss.loss_mode=forking actor.forking_loss=hapo            with hapo's values, around hapo

Defaults (paper): rho 0.2, clip 0.2/0.28 and c 10 as in DAPO, a mean over all response tokens. Differences from the
published code: entropies are the old policy's and the quantile is the whole step's (published: current policy, each
micro-batch), and all tokens as uncertain as the threshold are kept; the mean is over all tokens as in the paper, and
over the kept ones, as in the published code, with `forking_denominator=kept`; any proportional loss can be wrapped.
"""

import math
from fractions import Fraction
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from verl.trainer.ppo.core_algos import get_policy_loss_fn

from verl.utils.parts import parts, register_loss
from verl.utils.token_fields import TokenField
from verl.workers.config.keys import ACTOR, STRICT

FORKING_WEIGHT = TokenField("forking_weight", "actor.policy_loss.loss_mode=forking")


@dataclass(frozen=True, config=STRICT)
class ForkingKeys:
    """Keys under actor_rollout_ref.actor.

    Args:
        forking_ratio: rho, the share of the step's response tokens that are trained, those of the highest entropy.
        forking_loss: registered loss that is computed with the remaining advantages.
        forking_denominator: all: the loss stays a mean over all tokens; kept: it becomes one over the kept tokens, by
            a factor of all over kept tokens of the step.
    """

    forking_ratio: float = Field(default=0.2, gt=0, le=1)
    forking_loss: str = "vanilla"
    forking_denominator: Literal["all", "kept"] = "all"

    def check(self, config) -> None:
        """Raise ValueError if the wrapped loss is unknown, not registered as `proportional`, or itself wraps a loss."""
        fitting = [name for name, loss in parts("loss").items() if loss.proportional and not loss.wraps]
        if self.forking_loss not in fitting:
            raise ValueError(
                f"{ACTOR}.forking_loss={self.forking_loss}: the mask sets advantages to 0, and needs a loss that is "
                f"proportional to them: expected one of {', '.join(fitting)}"
            )


def forking_weights(
    entropy: torch.Tensor, mask: torch.Tensor, ratio: float, denominator: str
) -> tuple[torch.Tensor, float]:
    """Return each token's weight (B, T), 0 if it is not kept, and the smallest entropy of a kept token in nats.

    The share `ratio` of the tokens is kept, rounded up; equal entropies are kept or left out together, and those that
    are not finite left out. Kept tokens weigh 1, or with `denominator=kept` so much that the mean over all tokens is 1.
    """
    counted = mask.bool() & entropy.isfinite()
    values = entropy[counted].float().cpu().numpy()
    if not len(values):
        return torch.zeros(entropy.shape, device=entropy.device), 0.0
    rank = len(values) - math.ceil(Fraction(str(ratio)) * len(values))  # 0.07 of 100 is 7, and of floats more than 7
    threshold = float(np.partition(values, rank)[rank])
    kept = (counted & (entropy.float() >= threshold)).float()
    if denominator == "kept":
        kept *= mask.sum() / kept.sum()
    return kept, threshold


@register_loss(
    "forking",
    "80/20 (arXiv 2506.01939): another loss, only for the tokens of the highest entropy",
    requires="no algorithm.rollout_correction.bypass_mode: the old policy's entropies",
    keys=ForkingKeys,
    needs=(FORKING_WEIGHT,),
    wraps="forking_loss",
    values={"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 10.0},
    proportional=True,
)
def compute_policy_loss_forking(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config=None,
    rollout_is_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict]:
    """Return the loss `config.forking_loss` and its metrics with weighted advantages; all tensors (B, T)."""
    loss = get_policy_loss_fn(config.forking_loss)
    weighted = advantages * FORKING_WEIGHT.get()
    return loss(old_log_prob, log_prob, weighted, response_mask, loss_agg_mode, config, rollout_is_weights)
