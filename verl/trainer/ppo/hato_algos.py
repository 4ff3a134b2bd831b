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
from verl.trainer.ppo.core_algos import register_adv_est

from verl.trainer.ppo.token_fields import Given, TokenField
from verl.trainer.ppo.tree_nodes import SEGMENT_IDS, Nodes, batch_nodes

LOCAL_REWARDS = TokenField("local_rewards", "R_local of adv_estimator=hato", unsent=0.0)
DRAWS = TokenField("draws", "adv_estimator=hato", unsent=1)
# a HATOConfig (verl.workers.rollout.trees.hato.config)
HATO_SETTINGS = Given("hato_settings", "algorithm.adv_estimator=hato", "the settings under hato")
MIN_STD = 1e-6


class NodeOutcomes(NamedTuple):
    """What the verifier says of each node's answers; all float64.

    An answer counts as often as the steps on its path were drawn.

    Args:
        right: (N,) share of right answers below each node, in [0, 1].
        weight: (N,) how many answers are below each, up to a factor that siblings have in common.
        best, mean: (N,) of the outcomes below each, cut to [0, 1].
        prompt_right: (G,) share of right answers of each prompt (`nodes.prompts`).
    """

    right: torch.Tensor
    weight: torch.Tensor
    best: torch.Tensor
    mean: torch.Tensor
    prompt_right: torch.Tensor


class RewardParts(NamedTuple):
    """R and its parts of each node: (N,) float64; `verified` is beta R_path + gamma R_causal."""

    local: torch.Tensor
    path: torch.Tensor
    causal: torch.Tensor
    verified: torch.Tensor
    total: torch.Tensor


class SiblingAdvantages(NamedTuple):
    """Args:
    advantages: (N,) float64, not yet divided by the rows through a node.
    varies: (N,) whether beta R_path + gamma R_causal varies among the node's siblings, or those of its chain's first
        node (R where beta = gamma = 0): whether the verifier says anything here.
    """

    advantages: torch.Tensor
    varies: torch.Tensor


class StepCredit(NamedTuple):
    """All that HATO's credit finds out about a batch's nodes.

    >>> credit.parts.total[credit.nodes.of_segments(uid, hato_steps["segments"])]
    """

    nodes: Nodes
    draws: torch.Tensor
    outcomes: NodeOutcomes
    parts: RewardParts
    siblings: SiblingAdvantages

    @property
    def advantages(self) -> torch.Tensor:
        """(B, T) float32 of the tokens: a node that several rows share is trained once."""
        return self.nodes.to_tokens((self.siblings.advantages / self.nodes.passing).float())

    @property
    def varies(self) -> torch.Tensor:
        """(B, T) bool: what filter_groups leaves in the mask, so that nothing else weighs in the mean over tokens."""
        return self.nodes.to_tokens(self.siblings.varies)


def node_outcomes(nodes: Nodes, outcomes: torch.Tensor, draws: torch.Tensor, threshold: float) -> NodeOutcomes:
    """Args:
    outcomes: (B,) the verifier's reward of each row.
    draws: (N,) how often each node was drawn.
    threshold: an outcome above it is right (`hato.verification_threshold`).
    """
    outcomes, n_rows = outcomes.double(), len(outcomes)
    # siblings have the steps before them in common: weights of whole rows compare them as weights from the step on do
    of_passes = draws.double()[nodes.pass_node]
    weights = torch.ones(n_rows, dtype=torch.float64).scatter_reduce_(0, nodes.pass_row, of_passes, "prod")
    right, rewards = (outcomes > threshold).double(), outcomes.clamp(0, 1)
    below = nodes.sum_below(weights)
    best = torch.zeros(len(nodes), dtype=torch.float64)
    best.scatter_reduce_(0, nodes.pass_node, rewards[nodes.pass_row], "amax")
    of_prompts = torch.zeros(2, len(nodes.prompts), dtype=torch.float64)
    of_prompts.index_add_(1, nodes.row_group, torch.stack([weights * right, weights]))
    return NodeOutcomes(
        right=nodes.sum_below(weights * right) / below,
        weight=below,
        best=best,
        mean=nodes.sum_below(weights * rewards) / below,
        prompt_right=of_prompts[0] / of_prompts[1],
    )


def reward_parts(nodes: Nodes, outcomes: NodeOutcomes, local: torch.Tensor, hato) -> RewardParts:
    """Args:
    local: (N,) R_local.
    hato: the settings `reward_weights` (alpha, beta, gamma) and `path_reward` (`best` or `mean`).
    """
    path = outcomes.mean if hato.path_reward == "mean" else outcomes.best
    right = outcomes.right * outcomes.weight
    siblings_right, siblings_weight = (nodes.sum_of_siblings(x) - x for x in (right, outcomes.weight))
    alone = nodes.sum_of_siblings(torch.ones_like(nodes.parent)) == 1
    # `alone` first: a difference of equal sums may be off by rounding
    others = siblings_right / siblings_weight.masked_fill(alone, 1)
    causal = torch.where(alone, path, (outcomes.right - others).clamp(min=0)).masked_fill(outcomes.right == 0, 0)
    weights = hato.reward_weights
    local, verified = local.double(), weights.beta * path + weights.gamma * causal
    return RewardParts(local, path, causal, verified, weights.alpha * local + verified)


def sibling_advantages(
    nodes: Nodes,
    parts: RewardParts,
    draws: torch.Tensor,
    hato,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
) -> SiblingAdvantages:
    """draws (R - mean) / (std + eps) over siblings, each as often as it was drawn; std as GRPO's (n - 1).

    The factor `draws` makes the gradient that of the batch in which identical siblings had not been merged. R that
    differ by no more than rounding are equal.

    Args:
        hato: the settings `reward_weights` and `train_on_local_reward_alone`.
        norm_adv_by_std_in_grpo: False: minus the mean only.
    """
    weights = draws.double()
    n = nodes.sum_of_siblings(weights)

    def centered(rewards: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        difference = rewards - nodes.sum_of_siblings(weights * rewards) / n
        return difference, (nodes.sum_of_siblings(weights * difference**2) / (n - 1).clamp(min=1)).sqrt()

    difference, std = centered(parts.total)
    only_local = hato.reward_weights.beta == hato.reward_weights.gamma == 0
    varies = std > MIN_STD if only_local else centered(parts.verified)[1] > MIN_STD
    trained = (std > MIN_STD) & (varies | hato.train_on_local_reward_alone)
    advantages = weights * difference.masked_fill(~trained, 0)
    if norm_adv_by_std_in_grpo:
        advantages = advantages / (std + epsilon)
    start = nodes.chain_start(nodes.sum_of_siblings(torch.ones_like(nodes.parent)) == 1)
    return SiblingAdvantages(advantages[start], varies[start])


def step_credit(
    nodes: Nodes,
    outcomes: torch.Tensor,
    hato,
    local_rewards: torch.Tensor | None = None,
    draws: torch.Tensor | None = None,
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
        epsilon, norm_adv_by_std_in_grpo: see `sibling_advantages`.
    """
    ones = torch.ones_like(nodes.parent)
    drawn = ones if draws is None else nodes.at_first_token(draws).clamp(min=1)
    local = 0.0 * ones if local_rewards is None else nodes.at_first_token(local_rewards)
    of_nodes = node_outcomes(nodes, outcomes, drawn, hato.verification_threshold)
    parts = reward_parts(nodes, of_nodes, local, hato)
    siblings = sibling_advantages(nodes, parts, drawn, hato, epsilon, norm_adv_by_std_in_grpo)
    return StepCredit(nodes, drawn, of_nodes, parts, siblings)


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
        RuntimeError: nobody gave the segments (`SEGMENT_IDS.given`) or the settings (`HATO_SETTINGS.given`).
        ValueError: they have another shape than the mask.
    """
    hato, nodes, outcomes = HATO_SETTINGS.get(), batch_nodes(index, response_mask), token_level_rewards.sum(dim=-1)
    fields = LOCAL_REWARDS.get_optional(), DRAWS.get_optional()
    return SEGMENT_IDS.once(
        "hato",
        (index, outcomes, hato, *fields, epsilon, norm_adv_by_std_in_grpo),
        lambda: step_credit(nodes, outcomes, hato, *fields, epsilon, norm_adv_by_std_in_grpo),
    )


@register_adv_est("hato")
def compute_hato_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: np.ndarray,
    epsilon: float = 1e-6,
    config=None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """HATO's sibling-relative advantage.

    Args:
        token_level_rewards: (B, T); their sum is the row's outcome.
        response_mask: (B, T); advantages outside it (a tool's tokens, padding) are 0.
        index: (B,) prompt ids; the first steps of a prompt's rows are siblings.
        epsilon: added to the standard deviation.
        config: upstream's algorithm config, for `norm_adv_by_std_in_grpo`.

    Returns:
        advantages and returns, the same (B, T) tensor.

    Raises:
        as `batch_credit`.
    """
    norm = True if config is None else config.get("norm_adv_by_std_in_grpo", True)
    with torch.no_grad():
        credit = batch_credit(token_level_rewards, response_mask, index, epsilon, norm)
        advantages = credit.advantages * response_mask
    return advantages, advantages


class SiblingGroups(NamedTuple):
    """Of each group of at least two siblings: its prompt's number, its draws, and whether it varies."""

    prompt: torch.Tensor
    draws: torch.Tensor
    varies: torch.Tensor


def sibling_groups(credit: StepCredit) -> SiblingGroups:
    """Whatever `hato.train_on_local_reward_alone` says, a group that differs in R_local alone does not vary."""
    nodes = credit.nodes
    numbers, n = nodes.sibling_group, len(nodes) + len(nodes.prompts)
    compared = numbers.bincount(minlength=n) > 1
    varies = torch.zeros(n, dtype=torch.bool).index_fill_(0, numbers[credit.siblings.varies], True)
    draws = torch.zeros(n, dtype=torch.long).index_add_(0, numbers, credit.draws)
    prompt = torch.cat([nodes.group, torch.arange(len(nodes.prompts))])
    return SiblingGroups(prompt[compared], draws[compared], varies[compared])


def sibling_metrics(credit: StepCredit, response_mask: torch.Tensor) -> dict[str, float]:
    """What the trainer reports of sibling groups: how many, how large, and how many (and how much text) do not vary.

    Returns:
        `sibling_groups` of at least two different steps; `sibling_group_size` (mean number of draws);
        `groups_without_variance`, `tokens_without_variance` (shares; of the tokens that the mask has; 1 where there is
        no sibling group).
    """
    groups = sibling_groups(credit)
    if not len(groups.prompt):
        shares = dict.fromkeys(("groups_without_variance", "tokens_without_variance"), 1.0)
        return {"sibling_groups": 0.0, "sibling_group_size": 0.0} | shares
    trained = (response_mask * credit.varies).sum() / response_mask.sum().clamp(min=1)
    return {
        "sibling_groups": float(len(groups.prompt)),
        "sibling_group_size": groups.draws.float().mean().item(),
        "groups_without_variance": 1 - groups.varies.float().mean().item(),
        "tokens_without_variance": 1 - trained.item(),
    }


def share_of_varying_groups(credit: StepCredit) -> torch.Tensor:
    """(G,) of each prompt's sibling groups the share that varies: how much its tree says; 0 where there is no group."""
    groups, n_prompts = sibling_groups(credit), len(credit.nodes.prompts)
    varying = groups.prompt[groups.varies].bincount(minlength=n_prompts)
    return varying / groups.prompt.bincount(minlength=n_prompts).clamp(min=1)
