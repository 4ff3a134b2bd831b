"""GiGPO's credit (arXiv 2505.10978; `algorithm.adv_estimator=gigpo`): turns after the same observation are compared.

    A = A_episode + step_advantage_w A_step
    A_episode   the trajectory's outcome against the other trajectories of its prompt
    A_step      the turn's return Q against the prompt's turns after the same observation; 0 where there is no other
    Q           the sum of the rewards from the turn on, discounted by gamma for each turn between

A turn is a run of the model's tokens; its observation is the tool's tokens right before it, or the prompt. A reward
belongs to the turn that contains or precedes it. Outcomes 1 and 0, two turns each, the second after different results,
gamma 0.5: 0.75, 0.5 and -0.75, -0.5. In a tree a turn that several trajectories share is one visit with their mean Q; a
shared token has A_step in each of them, as it has A_episode.

Defaults are the authors'. Differences from their code: mean and standard deviation of A_episode are over trajectories,
theirs over steps, so that long trajectories weigh more; a prompt's only trajectory has 0, theirs its own score; their
option to compare similar observations is not built.
"""

from typing import Literal

import numpy as np
import torch
from omegaconf import OmegaConf
from pydantic import Field
from pydantic.dataclasses import dataclass

from verl.trainer.ppo.credit.nodes import SEGMENT_IDS, batch_nodes, trajectory_advantages
from verl.utils.parts import Compares, register_credit
from verl.utils.token_fields import TokenField
from verl.workers.config.keys import STRICT

RESPONSES = TokenField("responses", "algorithm.adv_estimator=gigpo", unsent=0, on_demand=True)


@dataclass(frozen=True, config=STRICT)
class GiGPOKeys:
    """Keys under algorithm.gigpo.

    Args:
        step_advantage_w: weight of A_step.
        gamma: discount of a reward for each turn.
        mode: `mean_norm` subtracts the mean, `mean_std_norm` also divides by the standard deviation; in both parts,
            whatever `algorithm.norm_adv_by_std_in_grpo` says.
    """

    step_advantage_w: float = Field(default=1.0, ge=0)
    gamma: float = Field(default=0.95, ge=0, le=1)
    mode: Literal["mean_norm", "mean_std_norm"] = "mean_norm"

    def check(self, config) -> None:
        """Raise ValueError if `rollout_correction.rollout_rs` is set: turns are read off the mask, which it changes."""
        if rejects := OmegaConf.select(config, "algorithm.rollout_correction.rollout_rs"):
            raise ValueError(
                f"algorithm.rollout_correction.rollout_rs={rejects} takes tokens out of the mask, by which "
                "algorithm.adv_estimator=gigpo tells turns from results of tools: set it to null"
            )


def turns_of(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return each turn's row, first column and end column (exclusive), by row. The mask (B, T) must be signed integers,
    as differences of booleans have no sign."""
    edges = np.diff(np.pad(mask, ((0, 0), (1, 1))), axis=1)
    rows, starts = np.nonzero(edges == 1)
    return rows, starts, np.nonzero(edges == -1)[1]


def returns_of(rewards: np.ndarray, rows: np.ndarray, begins: np.ndarray, gamma: float) -> np.ndarray:
    """Return the discounted return (K,) of each of K turns, from the rewards (B, T) of the tokens.

    Args:
        rows: (K,) row of each turn, ascending; the turns of a row are in order.
        begins: (K,) column from which rewards belong to the turn, up to the row's next turn.
    """
    returns = np.zeros(len(rows))
    for turn in reversed(range(len(rows))):
        is_last = turn + 1 == len(rows) or rows[turn + 1] != rows[turn]
        end = None if is_last else begins[turn + 1]
        later = 0.0 if is_last else returns[turn + 1]
        returns[turn] = rewards[rows[turn], begins[turn] : end].sum() + gamma * later
    return returns


@register_credit(
    "gigpo",
    "GiGPO (arXiv 2505.10978): each trajectory against its prompt's, plus each turn against the turns after the same "
    "observation",
    keys=GiGPOKeys,
    compares=Compares.NODES,
    needs=(SEGMENT_IDS, RESPONSES),
)
def compute_gigpo_advantage(
    rewards: torch.Tensor, mask: torch.Tensor, index: np.ndarray, epsilon: float, norm: bool, keys: GiGPOKeys
) -> torch.Tensor:
    """Return the advantages (B, T); `keys.mode` replaces `norm`."""
    norm = keys.mode == "mean_std_norm"
    episode = trajectory_advantages(rewards, index, epsilon, norm)
    rows, starts, ends = turns_of(mask.bool().numpy().astype(np.int8))
    is_first = np.append(True, rows[1:] != rows[:-1])[: len(rows)]
    before = np.where(is_first, 0, np.roll(ends, 1))
    returns = returns_of(rewards.double().numpy(), rows, np.where(is_first, 0, starts), keys.gamma)
    # Rows share a turn if its last token is the same token of the tree; a shared turn is one visit.
    last_tokens = batch_nodes(index, mask).token_nodes.numpy()[rows, ends - 1] * (mask.shape[1] + 1) + ends
    _, turn_of_visit, visit_of_turn = np.unique(last_tokens, return_index=True, return_inverse=True)
    visit_returns = np.bincount(visit_of_turn, returns) / np.bincount(visit_of_turn)
    responses = RESPONSES.get().numpy()
    sets: list[int] = []
    numbers: dict[tuple, int] = {}
    for turn in turn_of_visit:
        observation = responses[rows[turn], before[turn] : starts[turn]].tobytes()
        sets.append(numbers.setdefault((index[rows[turn]], observation), len(numbers)))
    steps = trajectory_advantages(torch.from_numpy(visit_returns).unsqueeze(-1), np.array(sets, int), epsilon, norm)
    token_steps = steps[visit_of_turn].repeat_interleave(torch.from_numpy(ends - starts))
    advantages = episode.unsqueeze(-1).repeat(1, mask.shape[1])
    advantages[mask.bool()] += keys.step_advantage_w * token_steps.to(advantages.dtype)
    return advantages
