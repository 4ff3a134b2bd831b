"""The mathematics of ARPO (arXiv 2507.19849) and AEPO (arXiv 2510.14545): hard advantage, balanced clipping, advantage.

ARPO's trajectories share segments of one tree. `adv_estimator=grpo` is its soft advantage, `arpo_hard` its hard one: a
shared token carries the mean advantage of the trajectories through it. AEPO's two mechanisms are in the loss `aepo`.
What depends on the batch (segments, standardised entropy) is computed once per training step over the whole batch, so
that no result depends on how the batch is cut. Shapes: B trajectories, T response positions.

    >>> # segment 0 is shared, 1 and 2 follow it; the first trajectory was right, the second wrong
    >>> segment_ids = torch.tensor([[0, 0, 1, 1], [0, 0, 2, 2]])
    >>> hard, passing = mean_over_segments(torch.tensor([1.0, -1.0]), segment_ids, torch.tensor([0, 0]))
    >>> hard.tolist()
    [[0.0, 0.0, 1.0, 1.0], [0.0, 0.0, -1.0, -1.0]]
    >>> passing.tolist()
    [[2, 2, 1, 1], [2, 2, 1, 1]]
"""

from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import numpy as np
import torch
from verl.trainer.ppo.core_algos import (
    agg_loss,
    compute_grpo_outcome_advantage,
    compute_policy_loss_vanilla,
    register_adv_est,
    register_policy_loss,
)
from verl.utils.torch_functional import masked_mean


class TokenField:
    """A (B, T) tensor for a registered function whose signature upstream fixes: `with FIELD.given(tensor): ...`."""

    def __init__(self, name: str, needed_by: str):
        self.name, self.needed_by = name, needed_by
        self._tensor: ContextVar[torch.Tensor | None] = ContextVar(name, default=None)

    @contextmanager
    def given(self, tensor: torch.Tensor):
        token = self._tensor.set(tensor)
        try:
            yield
        finally:
            self._tensor.reset(token)

    def get(self) -> torch.Tensor:
        """Raises RuntimeError where no tensor has been given."""
        if (tensor := self._tensor.get()) is None:
            raise RuntimeError(f"{self.needed_by} needs every token's {self.name}: use the ARPO trainer (recipe/arpo)")
        return tensor


SEGMENT_IDS = TokenField("segment_ids", "algorithm.adv_estimator=arpo_hard")
STANDARDISED_ENTROPY = TokenField("standardised_entropy", "actor.enable_entropy_balanced_advantage=true")


# ---- ARPO: advantages ----


def mean_over_segments(
    advantages: torch.Tensor, segment_ids: torch.Tensor, groups: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's mean advantage over the trajectories through its segment (ARPO, advantage attribution, hard).

    Args:
        advantages: (B,) advantage of each trajectory; one that is there twice counts twice.
        segment_ids: (B, T) integers; within a group equal ids are the same segment. -1: no segment, the token is its
            trajectory's own.
        groups: (B,) the trajectory's prompt, any integers from 0.

    Returns:
        advantages (B, T), and the number of trajectories through each token (B, T).
    """
    n_rows = len(advantages)
    if not segment_ids.numel():
        return advantages.new_zeros(segment_ids.shape), torch.ones_like(segment_ids)
    # a run is a stretch of one id in one row: far fewer of them than of tokens
    is_start = torch.ones_like(segment_ids, dtype=torch.bool)
    torch.ne(segment_ids[:, 1:], segment_ids[:, :-1], out=is_start[:, 1:])
    starts = is_start.flatten().nonzero().squeeze(-1)
    lengths = starts.diff(append=starts.new_tensor([segment_ids.numel()]))
    rows, ids = starts // segment_ids.shape[1], segment_ids.flatten()[starts]
    segment_of_run = (groups[rows] * (ids.max() + 2) + ids + 1).unique(return_inverse=True)[1]
    # a row passes a segment once, however many runs it has there
    passes = (segment_of_run * n_rows + rows).unique()
    segments, passing_rows = passes // n_rows, passes % n_rows
    n_passing = segments.bincount()
    mean = advantages.new_zeros(len(n_passing)).index_add_(0, segments, advantages[passing_rows]) / n_passing
    hard = torch.where(ids >= 0, mean[segment_of_run], advantages[rows])
    passing = torch.where(ids >= 0, n_passing[segment_of_run], 1)
    return tuple(of_run.repeat_interleave(lengths).view_as(segment_ids) for of_run in (hard, passing))


def trajectory_advantages(
    token_level_rewards: torch.Tensor, index: np.ndarray, epsilon: float = 1e-6, norm_adv_by_std_in_grpo: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """GRPO's advantage of every trajectory (B,), whatever its mask, and the number of its group (B,)."""
    scores = token_level_rewards.sum(dim=-1, keepdim=True)
    soft, _ = compute_grpo_outcome_advantage(scores, torch.ones_like(scores), index, epsilon, norm_adv_by_std_in_grpo)
    groups = torch.from_numpy(np.unique(index, return_inverse=True)[1]).to(scores.device)
    return soft.squeeze(-1), groups


@register_adv_est("arpo_hard")
def compute_arpo_hard_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: np.ndarray,
    epsilon: float = 1e-6,
    config=None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """ARPO's hard advantage (`algorithm.adv_estimator=arpo_hard`): GRPO's, averaged over shared segments.

    Args:
        token_level_rewards: (B, T); their sum is the trajectory's outcome.
        response_mask: (B, T); advantages outside it (a tool's tokens, padding) are 0.
        index: (B,) prompt ids; equal ones are one group.
        epsilon: added to the standard deviation.
        config: upstream's algorithm config, for `norm_adv_by_std_in_grpo`.

    Returns:
        advantages and returns, the same (B, T) tensor.

    Raises:
        RuntimeError: nobody gave the segments (`SEGMENT_IDS.given`).
        ValueError: they have another shape than the mask.
    """
    segment_ids = SEGMENT_IDS.get()
    if segment_ids.shape != response_mask.shape:
        raise ValueError(f"segment_ids {tuple(segment_ids.shape)}: expected {tuple(response_mask.shape)}")
    norm = True if config is None else config.get("norm_adv_by_std_in_grpo", True)
    with torch.no_grad():
        soft, groups = trajectory_advantages(token_level_rewards, index, epsilon, norm)
        hard, _ = mean_over_segments(soft, segment_ids, groups)
        hard = hard * response_mask
    return hard, hard


# ---- AEPO: entropy-balanced policy optimisation ----


class EntropyMoments(NamedTuple):
    """Mean and population standard deviation, in nats, of a batch's token entropies; 0 without a token."""

    mean: float = 0.0
    std: float = 0.0


def standardise_entropy(entropy: torch.Tensor, response_mask: torch.Tensor) -> tuple[torch.Tensor, EntropyMoments]:
    """(H - mean) / std over the batch's valid tokens.

    Args:
        entropy: (B, T) entropy in nats of the old policy over the full vocabulary.
        response_mask: (B, T) tokens that count; the others get 0.

    Returns:
        (B, T) float32 without gradient, all 0 where the entropies do not differ; and the moments.
    """
    mask = response_mask.bool()
    standardised = torch.where(mask, entropy.detach().float(), 0.0)
    n = mask.sum().item()
    if n == 0:
        return standardised, EntropyMoments()
    mean = standardised.sum(dtype=torch.float64).item() / n
    standardised.sub_(mean).mul_(mask)
    std = torch.linalg.vector_norm(standardised, dtype=torch.float64).item() / n**0.5
    # equal entropies differ by rounding alone
    return standardised.mul_(1 / std if std > 1e-6 else 0.0), EntropyMoments(mean, std)


def entropy_balanced_advantage(
    advantages: torch.Tensor, standardised_entropy: torch.Tensor, coef: float = 0.2
) -> torch.Tensor:
    """AEPO's entropy-aware advantage A (1 + coef z), all (B, T); no gradient flows into z.

    The factor is at least 0, so that a token far more certain than the others never has its advantage turned round
    (published: no bound).
    """
    return advantages * (1 + coef * standardised_entropy.detach()).clamp(min=0.0)


def entropy_balanced_clipping(ratio: torch.Tensor, clip_ratio_high: float) -> torch.Tensor:
    """The ratio clipped from above without killing its gradient: AEPO's (1 + eps_high) ratio / stop_grad(ratio).

    Where the ratio exceeds 1 + eps_high, that bound is its value and (1 + eps_high) d log_prob its gradient.
    """
    bound = 1 + clip_ratio_high
    return torch.where(ratio > bound, bound * ratio / ratio.detach(), ratio)


def revived_losses(
    ratio: torch.Tensor, advantages: torch.Tensor, clip_ratio_high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """What balanced clipping adds to PPO's token losses: value 0, and the gradient that the upper clip killed.

    It kills the gradient of tokens with A > 0 and a ratio above the clip; with A < 0 PPO's minimum takes the unclipped
    side there. Returns the losses and the mask of those tokens, both (B, T).
    """
    killed = (advantages > 0) & (ratio > 1 + clip_ratio_high)
    clipped = entropy_balanced_clipping(ratio, clip_ratio_high)
    return torch.where(killed, -advantages * (clipped - clipped.detach()), 0.0), killed


@register_policy_loss("aepo")
def compute_policy_loss_aepo(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config=None,
    rollout_is_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict]:
    """Upstream's dual-clip PPO (`vanilla`) with AEPO's two mechanisms; all tensors (B, T).

    Balanced clipping leaves the loss's value and changes its gradient; the balanced advantage changes both. `config` is
    the actor's, with `enable_entropy_balanced_clipping`, `enable_entropy_balanced_advantage` and
    `entropy_advantage_coef`. With both switches off it is `vanilla`. z comes from `STANDARDISED_ENTROPY`.

    Raises:
        RuntimeError: the balanced advantage is on and nobody gave z.
    """
    if config.enable_entropy_balanced_advantage:
        advantages = entropy_balanced_advantage(advantages, STANDARDISED_ENTROPY.get(), config.entropy_advantage_coef)
    loss, metrics = compute_policy_loss_vanilla(
        old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights
    )
    if config.enable_entropy_balanced_clipping:
        high = config.clip_ratio_high if config.clip_ratio_high is not None else config.clip_ratio
        ratio = (log_prob - old_log_prob).clamp(min=-20.0, max=20.0).exp()
        losses, alive = revived_losses(ratio, advantages, high)
        if rollout_is_weights is not None:
            losses = losses * rollout_is_weights
        loss = loss + agg_loss(losses, response_mask, loss_agg_mode, **config.global_batch_info)
        metrics["actor/aepo/kept_alive"] = masked_mean(alive.float(), response_mask).item()
    return loss, metrics
