"""HATO's credit: every reasoning step against its siblings (`algorithm.adv_estimator=hato`), on every kind of tree.

A step is a node of `segment_ids` (tree_nodes.py); its siblings follow the same node, or the same prompt. In [0, 1] are

    R_local    what the rollout gave the step (`LOCAL_REWARDS`); 0 without it
    R_path     the best outcome below the step, cut to [0, 1], or their mean
    R_causal   share of right answers below the step minus that below its siblings, at least 0; R_path without siblings
    R          alpha R_local + beta R_path + gamma R_causal

    problem ─┬─ 1 ─┬─ 2 right    R_path    1: 1   2: 1   3: 0   4: 0
             │     └─ 3 wrong    R_causal  1: 1/2 - 0 = 1/2   2: 1 - 0 = 1   3, 4: nothing right below, 0
             └─ 4 wrong          R of beta = gamma = 1/2    1: 0.75   2: 1   3: 0   4: 0
                                 minus the siblings' mean   1: +0.375   4: -0.375   2: +0.5   3: -0.5

    row   nodes    advantages (norm_adv_by_std_in_grpo=false), for each token of the node
    2     1 2      +0.375 / 2    +0.5      node 1 is in two rows and trained once: half in each
    3     1 3      +0.375 / 2    -0.5
    4     4        -0.375

Decided here, as the notes do not say it:
- R_path is the reward itself: what a verifier gives for the form of a wrong answer counts, else nothing would keep a
  policy to the form where no answer is right. R_causal counts right and wrong alone.
- A step that was drawn k times (`DRAWS`; 1 without it) is k siblings, and the answers below it count k times.
- An only child has its parent's advantage: a chain without a fork is one step, cut into pieces. A chain from the prompt
  has 0.
- Siblings whose beta R_path + gamma R_causal are all equal have 0, however much R_local differs: normalized to full
  weight, a heuristic alone would be noise. `hato.train_on_local_reward_alone` asks for it, and so do beta = gamma = 0.
"""

from typing import NamedTuple

import numpy as np
import torch

from verl.trainer.ppo.credit.nodes import SEGMENT_IDS, Nodes, batch_nodes
from verl.utils.parts import Compares, register_credit
from verl.utils.token_fields import ContextValue
from verl.workers.rollout.trajectory_tree import DROPPED_STEPS
from verl.workers.rollout.trees.hato.config import DRAWS, LOCAL_REWARDS, REWARD_KEYS

# a HATOConfig (verl.workers.rollout.trees.hato.config)
HATO_SETTINGS: ContextValue = ContextValue("hato_settings", "algorithm.adv_estimator=hato", "the settings under hato")
MIN_STD = 1e-6
PARTS = ("local", "path", "causal", "total")


class StepCredit(NamedTuple):
    """What HATO's credit finds out about a batch's nodes; of them are (N,), numbers in float64.

    >>> credit.total[credit.nodes.of_segments(uid, hato_steps["segments"])]

    Args:
        draws: how often each node was drawn.
        right: share of right answers below, in [0, 1]; an answer counts as often as the steps on its path were drawn.
            Rows without an answer do not count; 0 where there is none else.
        prompt_right: (G,) the share of each prompt (`nodes.prompts`).
        local, path, causal, total: R_local, R_path, R_causal and R.
        step_advantages: not yet divided by the rows through a node.
        step_varies: whether beta R_path + gamma R_causal varies among the node's siblings, or those of its chain's
            first node (R where beta = gamma = 0): whether the verifier says anything here.
    """

    nodes: Nodes
    draws: torch.Tensor
    right: torch.Tensor
    prompt_right: torch.Tensor
    local: torch.Tensor
    path: torch.Tensor
    causal: torch.Tensor
    total: torch.Tensor
    step_advantages: torch.Tensor
    step_varies: torch.Tensor

    @property
    def advantages(self) -> torch.Tensor:
        """(B, T) float32 of the tokens: a node that several rows share is trained once."""
        return self.nodes.to_tokens((self.step_advantages / self.nodes.passing).float())

    @property
    def varies(self) -> torch.Tensor:
        """(B, T) bool: what filter_groups leaves in the mask, so that nothing else weighs in the mean over tokens."""
        return self.nodes.to_tokens(self.step_varies)


def step_credit(
    nodes: Nodes,
    outcomes: torch.Tensor,
    hato,
    local_rewards: torch.Tensor | None = None,
    draws: torch.Tensor | None = None,
    dropped: torch.Tensor | None = None,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
) -> StepCredit:
    """HATO's credit of a batch, or of any trees, such as those that a filter has dropped.

    Args:
        nodes: `tree_nodes` or `batch_nodes`.
        outcomes: (B,) the verifier's reward of each row.
        hato: a HATOConfig.
        local_rewards: (B, T) R_local of each token's step; None: 0.
        draws: (B, T) how often each token's step was drawn; None: 1.
        dropped: (B, T) 1 in rows without an answer, which are wrong ones for R; None: 0.
        epsilon, norm_adv_by_std_in_grpo: see `_sibling_advantages`.
    """
    ones = torch.ones_like(nodes.parent)
    draws = ones if draws is None else nodes.at_first_token(draws).clamp(min=1)
    local = (0.0 * ones if local_rewards is None else nodes.at_first_token(local_rewards)).double()
    # siblings have the steps before them in common: weights of whole rows compare them as weights from the step on do
    weights = torch.ones(len(outcomes), dtype=torch.float64)
    weights.scatter_reduce_(0, nodes.pass_row, draws.double()[nodes.pass_node], "prod")
    has_answer = torch.ones_like(weights) if dropped is None else (~dropped.bool().any(dim=1)).double()
    rewards, is_right = outcomes.double().clamp(0, 1), (outcomes.double() > hato.verification_threshold) * has_answer
    below = nodes.sum_below(weights)
    if hato.path_reward == "mean":
        path = nodes.sum_below(weights * rewards) / below
    else:
        path = torch.zeros(len(nodes), dtype=torch.float64)
        path.scatter_reduce_(0, nodes.pass_node, rewards[nodes.pass_row], "amax")
    answers = torch.stack([weights * is_right, weights * has_answer])
    right_below, answers_below = map(nodes.sum_below, answers)
    causal = _causal_rewards(nodes, right_below / below, below, path)
    verified = hato.reward_weights.beta * path + hato.reward_weights.gamma * causal
    total = hato.reward_weights.alpha * local + verified
    advantages, varies = _sibling_advantages(nodes, total, verified, draws, hato, epsilon, norm_adv_by_std_in_grpo)
    of_prompts = torch.zeros(2, len(nodes.prompts), dtype=torch.float64).index_add_(1, nodes.row_group, answers)
    right, prompt_right = _share(right_below, answers_below), _share(*of_prompts)
    return StepCredit(nodes, draws, right, prompt_right, local, path, causal, total, advantages, varies)


def _share(part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """0 where there is nothing."""
    return part / whole.masked_fill(whole == 0, 1)


def _is_alone(nodes: Nodes) -> torch.Tensor:
    return nodes.sum_of_siblings(torch.ones_like(nodes.parent)) == 1


def _causal_rewards(nodes: Nodes, right: torch.Tensor, below: torch.Tensor, path: torch.Tensor) -> torch.Tensor:
    """R_causal (N,) of the shares of right answers, the weights of all answers below, and R_path."""
    siblings_right, siblings_below = (nodes.sum_of_siblings(x) - x for x in (right * below, below))
    alone = _is_alone(nodes)
    # `alone` first: a difference of equal sums may be off by rounding
    others = siblings_right / siblings_below.masked_fill(alone, 1)
    return torch.where(alone, path, (right - others).clamp(min=0)).masked_fill(right == 0, 0)


def _sibling_advantages(
    nodes: Nodes,
    total: torch.Tensor,
    verified: torch.Tensor,
    draws: torch.Tensor,
    hato,
    epsilon: float,
    norm_adv_by_std_in_grpo: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """draws (R - mean) / (std + eps) over siblings, each as often as it was drawn; std as GRPO's (n - 1).

    The factor `draws` makes the gradient that of the batch in which identical siblings had not been merged. R that
    differ by no more than rounding are equal.

    Args:
        total, verified: (N,) R, and beta R_path + gamma R_causal.
        norm_adv_by_std_in_grpo: False: minus the mean only.

    Returns:
        `step_advantages` and `step_varies` of `StepCredit`.
    """
    weights = draws.double()
    n = nodes.sum_of_siblings(weights)

    def centered(rewards: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        difference = rewards - nodes.sum_of_siblings(weights * rewards) / n
        return difference, (nodes.sum_of_siblings(weights * difference**2) / (n - 1).clamp(min=1)).sqrt()

    difference, std = centered(total)
    only_local = hato.reward_weights.beta == hato.reward_weights.gamma == 0
    varies = std > MIN_STD if only_local else centered(verified)[1] > MIN_STD
    trained = (std > MIN_STD) & (varies | hato.train_on_local_reward_alone)
    advantages = weights * difference.masked_fill(~trained, 0)
    if norm_adv_by_std_in_grpo:
        advantages = advantages / (std + epsilon)
    start = nodes.chain_start(_is_alone(nodes))
    return advantages[start], varies[start]


def batch_credit(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: np.ndarray,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
) -> StepCredit:
    """`step_credit` of the segments, fields and settings that the trainer has given; made once for equal outcomes.

    So the trainer's metrics, value model and filter read what the estimator has computed. The parts are those of the
    trees also where another estimator is trained on.

    Raises:
        RuntimeError: nobody gave the segments (`SEGMENT_IDS.bound`) or the settings (`HATO_SETTINGS.bound`).
        ValueError: they have another shape than the mask.
    """
    hato, nodes, outcomes = HATO_SETTINGS.get(), batch_nodes(index, response_mask), token_level_rewards.sum(dim=-1)
    fields = (field.get_optional() for field in (LOCAL_REWARDS, DRAWS, DROPPED_STEPS))
    settings = hato, *fields, epsilon, norm_adv_by_std_in_grpo
    return SEGMENT_IDS.once("hato", (index, outcomes, *settings), lambda: step_credit(nodes, outcomes, *settings))


@register_credit(
    "hato",
    "HATO's notes: each step against its siblings alone, by R = alpha R_local + beta R_path + gamma R_causal",
    compares=Compares.NODES,
    needs=(SEGMENT_IDS, LOCAL_REWARDS, DRAWS, DROPPED_STEPS),
    values={f"hato.{key}": value for key, value in REWARD_KEYS.items()},
)
def compute_hato_advantage(
    rewards: torch.Tensor, mask: torch.Tensor, index: np.ndarray, epsilon: float, norm: bool
) -> torch.Tensor:
    """HATO's sibling-relative advantage; raises as `batch_credit`."""
    return batch_credit(rewards, mask, index, epsilon, norm).advantages


def _compared_siblings(credit: StepCredit) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each group of at least two siblings its prompt's number, its draws, and whether it varies.

    Whatever `hato.train_on_local_reward_alone` says, a group that differs in R_local alone does not vary.
    """
    nodes = credit.nodes
    numbers, n = nodes.sibling_group, len(nodes) + len(nodes.prompts)
    compared = numbers.bincount(minlength=n) > 1
    varies = torch.zeros(n, dtype=torch.bool).index_fill_(0, numbers[credit.step_varies], True)
    draws = torch.zeros(n, dtype=torch.long).index_add_(0, numbers, credit.draws)
    prompt = torch.cat([nodes.group, torch.arange(len(nodes.prompts))])
    return prompt[compared], draws[compared], varies[compared]


def sibling_metrics(credit: StepCredit, response_mask: torch.Tensor) -> dict[str, float]:
    """What the trainer reports of sibling groups: how many, how large, and how many (and how much text) do not vary.

    Returns:
        `sibling_groups` of at least two different steps; `sibling_group_size` (mean number of draws);
        `groups_without_variance`, `tokens_without_variance` (shares; of the tokens that the mask has; 1 where there is
        no sibling group).
    """
    _, draws, varies = _compared_siblings(credit)
    n_groups = max(len(draws), 1)
    trained = (response_mask * credit.varies).sum() / response_mask.sum().clamp(min=1)
    return {
        "sibling_groups": float(len(draws)),
        "sibling_group_size": draws.sum().item() / n_groups,
        "groups_without_variance": 1 - varies.sum().item() / n_groups,
        "tokens_without_variance": 1 - trained.item(),
    }


def share_of_varying_groups(credit: StepCredit) -> torch.Tensor:
    """(G,) of each prompt's sibling groups the share that varies: how much its tree says; 0 where there is no group."""
    prompt, _, varies = _compared_siblings(credit)
    n_prompts = len(credit.nodes.prompts)
    return prompt[varies].bincount(minlength=n_prompts) / prompt.bincount(minlength=n_prompts).clamp(min=1)
