"""The keys under `hato`, typed: a wrong key, type or range ends in one line that names it.

>>> HATOConfig.from_dict({"tree": {"max_depth": 0}})
Traceback (most recent call last):
ValueError: hato.tree.max_depth=0: expected at least 1
"""

from dataclasses import asdict
from typing import Literal

from omegaconf import DictConfig, OmegaConf
from pydantic import Field
from pydantic.dataclasses import dataclass

from verl.utils.token_fields import TokenField
from verl.workers.config.keys import STRICT, read_keys
from verl.workers.rollout.trees.hato.notes_names import in_our_names

HEURISTIC, REWARD_LOOP = "heuristic", "reward_loop"
# what rollouts say of each token of a step: R_local, and how often the step was drawn
LOCAL_REWARDS = TokenField("local_rewards", "R_local of adv_estimator=hato", unsent=0.0)
DRAWS = TokenField("draws", "adv_estimator=hato", unsent=1)


@dataclass(frozen=True, config=STRICT)
class TreeConfig:
    """The reasoning tree of one problem.

    Args:
        max_depth: steps of the longest path; a node at this depth runs to the final answer.
        branching_factor: children of a node.
        search_algorithm: `bfs` level by level; `dfs` the deepest node first; `beam` level by level, of which the best
            `max_nodes_per_level` are kept.
        max_nodes_per_level: kept nodes of a level.
        max_nodes: kept nodes of a tree, the root not counted; only they hold tokens (but see train_dropped).
        step_delimiter: text that ends a step.
        max_step_tokens: a longer step is cut into two; the last step, to the final answer, has no such bound.
        adaptive_branching: the number of children follows a node's promise, branching_factor on average.
        spread_leaves: a tree of n leaves and depth D has n^(d/D) ends at most after level d, so that it forks on all
            levels; else, and with dfs, it forks as early as it can.
        train_dropped: a step that the search drops before its answer is known becomes a row with reward 0, where the
            prompt has rows left. Until a tree is complete, dropped nodes hold tokens, too.
        independent_paths: no tree: as many paths from the problem as there are rows, which do not fork; a step has one
            child. branching_factor, adaptive_branching and spread_leaves do not count.
    """

    max_depth: int = Field(default=4, ge=1)
    branching_factor: int = Field(default=3, ge=1)
    search_algorithm: Literal["bfs", "dfs", "beam"] = "bfs"
    max_nodes_per_level: int = Field(default=16, ge=1)
    max_nodes: int = Field(default=128, ge=1)
    step_delimiter: str = Field(default="\n\n", min_length=1)
    max_step_tokens: int = Field(default=256, ge=1)
    adaptive_branching: bool = False
    spread_leaves: bool = True
    train_dropped: bool = False
    independent_paths: bool = False


@dataclass(frozen=True, config=STRICT)
class RewardWeights:
    """R = alpha R_local + beta R_path + gamma R_causal; each part is in [0, 1]."""

    alpha: float = Field(default=0.1, ge=0)
    beta: float = Field(default=0.7, ge=0)
    gamma: float = Field(default=0.2, ge=0)

    def __post_init__(self):
        if self.alpha == self.beta == self.gamma == 0:
            raise ValueError("hato.reward_weights: alpha, beta and gamma: expected not all 0")


@dataclass(frozen=True, config=STRICT)
class ExplorationConfig:
    """Which nodes are expanded, and how hot steps are sampled.

    Args:
        beta_u: a node's score is V + beta_u U, value and uncertainty.
        initial_temperature, temperature_decay: steps are sampled at T0 exp(-decay * progress of the training).
        pruning_threshold: a node whose score is below is dropped. V is an estimate of the share of right answers, so
            that 0 drops none.
        selection_temperature: of the softmax by which nodes are chosen; 0: the best ones.
        nodes_per_tree: the trees of a batch share so many nodes each by UCB, at most max_nodes of them one tree:
            problems whose steps differed in reward when they were last seen get more, and so do those that had few
            nodes so far. 0: every tree has max_nodes.
        ucb_coef: c of mean + c sqrt(log(all visits) / visits), by which they do.
    """

    beta_u: float = Field(default=0.5, ge=0)
    initial_temperature: float = Field(default=1.0, gt=0)
    temperature_decay: float = Field(default=0.1, ge=0)
    pruning_threshold: float = Field(default=0.0, ge=0, le=1)
    selection_temperature: float = Field(default=0.25, ge=0)
    nodes_per_tree: int = Field(default=0, ge=0)
    ucb_coef: float = Field(default=1.0, ge=0)


@dataclass(frozen=True, config=STRICT)
class ValueModelConfig:
    """Networks that estimate V: layers, their width, and the share of hidden units that the method `dropout` drops."""

    hidden_size: int = Field(default=64, ge=1)
    n_layers: int = Field(default=2, ge=1)
    dropout: float = Field(default=0.2, ge=0.001, le=0.999)


@dataclass(frozen=True, config=STRICT)
class UncertaintyConfig:
    """V and U of a node (value_model.py).

    Args:
        method: `ensemble`: n_models networks, each trained on its own resampling; `dropout`: n_passes masks of one
            network; `bootstrap`: n_passes resamplings of remembered outcomes; `none`: one network, U = 0.
        learning_rate, n_updates: of the networks, and their updates after each training step.
        entropy_top_k: a token's entropy is estimated from so many most likely tokens; 0: none is asked for, and the
            feature `mean_entropy` is 0. A vLLM server reports 20 at most.
    """

    method: Literal["ensemble", "dropout", "bootstrap", "none"] = "ensemble"
    n_models: int = Field(default=5, ge=1)
    n_passes: int = Field(default=10, ge=1)
    model_config: ValueModelConfig = Field(default_factory=ValueModelConfig)
    learning_rate: float = Field(default=3e-3, gt=0)
    n_updates: int = Field(default=30, ge=1)
    entropy_top_k: int = Field(default=10, ge=0, le=20)

    def __post_init__(self):
        estimates = {"ensemble": "n_models", "dropout": "n_passes", "bootstrap": "n_passes"}.get(self.method)
        if estimates and getattr(self, estimates) < 2:
            raise ValueError(f"hato.uncertainty.{estimates}=1: expected at least 2 for method={self.method}")


@dataclass(frozen=True, config=STRICT)
class MetaLearningConfig:
    """Over domains (`data_source`), on the policy's parameters.

    Args:
        method: `reptile`: theta += meta_lr (theta_inner - theta) after n_inner_steps; `maml`: first order.
        inner_lr: of maml's inner steps, plain gradient descent; reptile's are the actor's optimizer's.
    """

    enable: bool = False
    method: Literal["reptile", "maml"] = "reptile"
    meta_lr: float = Field(default=0.1, gt=0)
    inner_lr: float = Field(default=0.01, gt=0)
    n_inner_steps: int = Field(default=4, ge=1)


@dataclass(frozen=True, config=STRICT)
class MemoryConfig:
    """Bounds of what grows over a run.

    Args:
        value_buffer_size: steps that the value model remembers, the newest ones; of a training step a quarter of it at
            most, drawn at random.
        reference_prompts: prompts of which the paths of the first visit are kept for the novelty metric.
        reference_paths: of each.
        problems: of which the share of sibling groups that varied is kept (for nodes_per_tree); the oldest go first.
    """

    value_buffer_size: int = Field(default=8192, ge=4)
    reference_prompts: int = Field(default=1024, ge=0)
    reference_paths: int = Field(default=8, ge=1)
    problems: int = Field(default=100_000, ge=1)


@dataclass(frozen=True, config=STRICT)
class HATOConfig:
    """Everything under `hato`.

    Args:
        verification_threshold: a reward above it counts as a right answer.
        path_reward: R_path of a step is the `best` reward below it, cut to [0, 1], or their `mean`.
        local_reward: `heuristic`; the dotted name of a function (see local_reward.py); `answer_likelihood`: how likely
            the policy holds the reference answer after the step (see rollout/answer_likelihood.py), which
            reward_weights.alpha=0 keeps out of the training; or `reward_loop`: upstream's reward loop, where a process
            reward model can be served, scores the path up to the step, and the reward function finds the step's text in
            extra_info["hato_step"].
        train_on_local_reward_alone: whether siblings whose beta R_path + gamma R_causal are all equal are trained by
            R_local: its differences, however small, are normalized to full weight. With beta = gamma = 0 they always
            are. False: their advantage is 0.
    """

    tree: TreeConfig = Field(default_factory=TreeConfig)
    reward_weights: RewardWeights = Field(default_factory=RewardWeights)
    exploration: ExplorationConfig = Field(default_factory=ExplorationConfig)
    uncertainty: UncertaintyConfig = Field(default_factory=UncertaintyConfig)
    meta_learning: MetaLearningConfig = Field(default_factory=MetaLearningConfig)
    memory: MemoryConfig = Field(default_factory=MemoryConfig)
    verification_threshold: float = 0.5
    path_reward: Literal["best", "mean"] = "best"
    local_reward: str = HEURISTIC
    train_on_local_reward_alone: bool = False

    def __post_init__(self):
        drops = self.exploration.pruning_threshold > 0 or self.tree.search_algorithm == "beam"
        if self.tree.train_dropped and not drops:
            raise ValueError(
                "hato.tree.train_dropped=true has no effect: nothing is dropped with hato.exploration.pruning_threshold"
                f"=0 and hato.tree.search_algorithm={self.tree.search_algorithm}"
            )

    @classmethod
    def from_dict(cls, values: dict | DictConfig) -> "HATOConfig":
        """Return the typed settings of what a config holds under `hato`; the design notes' names work as well.

        Raises:
            ValueError: an unknown key, a wrong type, or a value out of range; names the key.
        """
        if isinstance(values, DictConfig):
            values = OmegaConf.to_container(values, resolve=True)
        return read_keys(cls, in_our_names(values, asdict(cls())), "hato")


# the keys that credit reads, with their defaults
REWARD_KEYS = {
    key: value
    for key, value in asdict(HATOConfig()).items()
    if key in ("verification_threshold", "path_reward", "reward_weights", "train_on_local_reward_alone")
}
