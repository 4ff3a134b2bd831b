"""HATO's credit: every reasoning step against its siblings (`algorithm.adv_estimator=hato`), on every kind of tree.

A step is a node of `segment_ids` (verl/trainer/ppo/credit/nodes.py); its siblings follow the same node or prompt.
Rewards are in [0, 1]:

    R_local    reward that the rollout gave the step (`LOCAL_REWARDS`); 0 without it
    R_path     best outcome below the step, cut to [0, 1], or the mean of the outcomes
    R_causal   share of right answers below the step minus that below its siblings, at least 0; R_path without siblings
               (`hato.causal_reward=notes`: see `_causal_of_notes`)
    R          alpha R_local + beta R_path + gamma R_causal

    problem ─┬─ 1 ─┬─ 2 right    R_path    1: 1   2: 1   3: 0   4: 0
             │     └─ 3 wrong    R_causal  1: 1/2 - 0 = 1/2   2: 1 - 0 = 1   3, 4: nothing right below, 0
             └─ 4 wrong          R of beta = gamma = 1/2    1: 0.75   2: 1   3: 0   4: 0
                                 minus the siblings' mean   1: +0.375   4: -0.375   2: +0.5   3: -0.5

    row   nodes    advantages (norm_adv_by_std_in_grpo=false), for each token of the node
    2     1 2      +0.375 / 2    +0.5      node 1 is in two rows and trained once: half in each
    3     1 3      +0.375 / 2    -0.5
    4     4        -0.375

Choices of this implementation, which HATO's notes leave open:
- R_path is the verifier's reward, including that for a wrong answer's format; otherwise nothing would keep a policy to
  the format where no answer is right. R_causal counts only right and wrong.
- A step that was drawn k times (`DRAWS`; 1 without it) counts as k siblings, and the answers below it count k times.
- An only child has its parent's advantage: a chain without a fork is one step, cut into pieces. A chain from the prompt
  has advantage 0.
- Siblings whose beta R_path + gamma R_causal are all equal have advantage 0, even if R_local differs: normalized to
  full weight, a heuristic alone would be noise. `hato.train_on_local_reward_alone` or beta = gamma = 0 allows it.
"""

from typing import NamedTuple

import numpy as np
import torch
from omegaconf import DictConfig

from recipe.hato.keys import DRAWS, LOCAL_REWARDS, REWARD_KEYS, hato_keys
from verl.trainer.ppo.credit.nodes import SEGMENT_IDS, Nodes, batch_nodes
from verl.utils.parts import Compares, register_credit
from verl.utils.token_fields import ContextValue
from verl.workers.rollout.trajectory_tree import DROPPED_STEPS

# a HATOConfig (recipe.hato.keys)
HATO_SETTINGS: ContextValue = ContextValue("hato_settings", "algorithm.adv_estimator=hato", "the settings under hato")
MIN_STD = 1e-6
PARTS = ("local", "path", "causal", "total")


class StepCredit(NamedTuple):
    """HATO's credit of a batch's nodes; its fields are (N,), numbers in float64, unless another shape is given.

    Args:
        draws: number of times each node was drawn.
        right: share of right answers below, in [0, 1], where an answer's weight is the product of the draws of all
            steps on its path. Rows without an answer do not count; 0 if there is no answer.
        prompt_right: (G,) share of right answers of each prompt (`nodes.prompts`).
        local, path, causal, total: the rewards R_local, R_path, R_causal and R.
        step_advantages: advantage of each node, not yet divided by the number of rows through it.
        step_varies: whether beta R_path + gamma R_causal (R if beta = gamma = 0) varies among the siblings of the node,
            or of its chain's first node. If it does not, the verifier prefers none of them.
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
        """The tokens' advantages (B, T) in float32; a node that several rows share is trained once."""
        return self.nodes.to_tokens((self.step_advantages / self.nodes.passing).float())

    @property
    def varies(self) -> torch.Tensor:
        """The boolean mask (B, T) of the tokens with `step_varies`; filter_groups takes the others out of the loss."""
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
    """Return HATO's credit of a batch, or of any trees, such as those that a filter has dropped.

    Args:
        outcomes: (B,) the verifier's reward of each row.
        hato: HATOConfig of the run.
        local_rewards: (B, T) R_local of each token's step; None means 0.
        draws: (B, T) number of times each token's step was drawn; None means 1.
        dropped: (B, T) 1 at dropped steps; a row with such a step has no answer and counts as wrong. None means 0.
    """
    ones = torch.ones_like(nodes.parent)
    draws = ones if draws is None else nodes.at_first_token(draws).clamp(min=1)
    local = (0.0 * ones if local_rewards is None else nodes.at_first_token(local_rewards)).double()
    # Siblings share all earlier steps, so weights of whole rows compare them as weights from the step on would.
    weights = torch.ones(len(outcomes), dtype=torch.float64)
    weights.scatter_reduce_(0, nodes.pass_row, draws.double()[nodes.pass_node], "prod")
    has_answer = torch.ones_like(weights) if dropped is None else (~dropped.bool().any(dim=1)).double()
    rewards, is_right = outcomes.double().clamp(0, 1), (outcomes > hato.verification_threshold) * has_answer
    below = nodes.sum_below(weights)
    if hato.path_reward == "mean":
        path = nodes.sum_below(weights * rewards) / below
    else:
        path = torch.zeros(len(nodes), dtype=torch.float64)
        path.scatter_reduce_(0, nodes.pass_node, rewards[nodes.pass_row], "amax")
    answers = torch.stack([weights * is_right, weights * has_answer])
    right_below, answers_below = map(nodes.sum_below, answers)
    if hato.causal_reward == "notes":
        successes = nodes.sum_below(weights * (rewards > 0))
        causal = _causal_of_notes(nodes, nodes.sum_below(weights * rewards), successes, draws, path)
    else:
        causal = _causal_rewards(nodes, right_below / below, below, path)
    verified = hato.reward_weights.beta * path + hato.reward_weights.gamma * causal
    total = hato.reward_weights.alpha * local + verified
    advantages, varies = _sibling_advantages(nodes, total, verified, draws, hato, epsilon, norm_adv_by_std_in_grpo)
    prompt_sums = torch.zeros(2, len(nodes.prompts), dtype=torch.float64).index_add_(1, nodes.row_group, answers)
    right, prompt_right = _share(right_below, answers_below), _share(*prompt_sums)
    return StepCredit(nodes, draws, right, prompt_right, local, path, causal, total, advantages, varies)


def _share(part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Return part / whole; 0 where the whole is 0."""
    return part / whole.masked_fill(whole == 0, 1)


def _is_alone(nodes: Nodes) -> torch.Tensor:
    return nodes.sum_of_siblings(torch.ones_like(nodes.parent)) == 1


def _causal_rewards(nodes: Nodes, right: torch.Tensor, below: torch.Tensor, path: torch.Tensor) -> torch.Tensor:
    """Return R_causal (N,) from the shares of right answers, the weights of all answers below, and R_path."""
    siblings_right, siblings_below = (nodes.sum_of_siblings(x) - x for x in (right * below, below))
    alone = _is_alone(nodes)
    # Only children are masked first, because a difference of equal sums may be off by rounding.
    others = siblings_right / siblings_below.masked_fill(alone, 1)
    return torch.where(alone, path, (right - others).clamp(min=0)).masked_fill(right == 0, 0)


def _causal_of_notes(
    nodes: Nodes, total: torch.Tensor, successes: torch.Tensor, draws: torch.Tensor, path: torch.Tensor
) -> torch.Tensor:
    """Return R_causal (N,) as the design notes define it: the mean reward of the successful paths (reward above 0)
    through a step, minus the mean over its siblings, each as often as it was drawn, of their such means.

    Siblings on no successful path do not count. The result is at least 0, R_path for an only child, and 0 for leaves
    and steps on no successful path. `total` and `successes` are the sum of the rewards of the successful paths through
    a step, and their number.
    """
    mean, counted = _share(total, successes), draws * (successes > 0)
    n_others = nodes.sum_of_siblings(counted) - counted
    others = _share(nodes.sum_of_siblings(counted * mean) - counted * mean, n_others).masked_fill(n_others == 0, 0)
    is_leaf = torch.ones_like(successes, dtype=torch.bool).index_fill_(0, nodes.parent[nodes.parent >= 0], False)
    causal = torch.where(_is_alone(nodes), path, (mean - others).clamp(min=0))
    return causal.masked_fill(is_leaf | (successes == 0), 0)


def _sibling_advantages(
    nodes: Nodes,
    total: torch.Tensor,
    verified: torch.Tensor,
    draws: torch.Tensor,
    hato,
    epsilon: float,
    norm_adv_by_std_in_grpo: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute draws (R - mean) / (std + eps) over siblings, each counted as often as drawn; std as in GRPO (n - 1).

    The factor `draws` gives the gradient of a batch in which identical siblings are not merged. Values of R that differ
    only by rounding count as equal. `verified` is beta R_path + gamma R_causal. The result is `step_advantages` and
    `step_varies` of `StepCredit`.
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
    """Return `step_credit` of the segments, fields and settings that the trainer binds (verl/utils/token_fields.py).

    Further calls with equal outcomes return the first one's result, so the trainer's metrics, value model and filter
    read what the estimator has computed. The trainer also calls it where another estimator computes the advantages.
    """
    hato, nodes, outcomes = HATO_SETTINGS.get(), batch_nodes(index, response_mask), token_level_rewards.sum(dim=-1)
    fields = (field.get_optional() for field in (LOCAL_REWARDS, DRAWS, DROPPED_STEPS))
    settings = hato, *fields, epsilon, norm_adv_by_std_in_grpo
    return SEGMENT_IDS.once("hato", (index, outcomes, *settings), lambda: step_credit(nodes, outcomes, *settings))


def check_credit(config: DictConfig) -> None:
    """Check the keys on which adv_estimator=hato depends."""
    hato_keys(config)
    if config.algorithm.use_kl_in_reward:
        raise ValueError(
            "algorithm.use_kl_in_reward=true would change the verifier's rewards, of which adv_estimator=hato asks "
            "whether they are right; use actor.use_kl_loss"
        )


@register_credit(
    "hato",
    "HATO's notes: each step against its siblings alone, by R = alpha R_local + beta R_path + gamma R_causal",
    checks=check_credit,
    compares=Compares.NODES,
    needs=(SEGMENT_IDS, LOCAL_REWARDS, DRAWS, DROPPED_STEPS),
    values={f"hato.{key}": value for key, value in REWARD_KEYS.items()},
)
def compute_hato_advantage(
    rewards: torch.Tensor, mask: torch.Tensor, index: np.ndarray, epsilon: float, norm: bool
) -> torch.Tensor:
    """Return HATO's sibling-relative advantages (B, T)."""
    return batch_credit(rewards, mask, index, epsilon, norm).advantages


def share_of_varying_groups(credit: StepCredit) -> torch.Tensor:
    """Return the share (G,) of each prompt's groups of at least two siblings that vary; 0 for a prompt without such
    groups. A group that differs in R_local alone does not vary, whatever `hato.train_on_local_reward_alone` says."""
    nodes, n_prompts = credit.nodes, len(credit.nodes.prompts)
    numbers, n = nodes.sibling_group, len(nodes) + n_prompts
    compared = numbers.bincount(minlength=n) > 1
    varies = torch.zeros(n, dtype=torch.bool).index_fill_(0, numbers[credit.step_varies], True)[compared]
    prompt = torch.cat([nodes.group, torch.arange(n_prompts)])[compared]
    return prompt[varies].bincount(minlength=n_prompts) / prompt.bincount(minlength=n_prompts).clamp(min=1)
