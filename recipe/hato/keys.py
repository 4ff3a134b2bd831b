"""The keys under `hato`, with types: a wrong key, type or range raises one line that names it.

>>> read_keys(HATOConfig, {"tree": {"max_depth": 0}}, "hato")
Traceback (most recent call last):
ValueError: hato.tree.max_depth=0: expected at least 1
"""

from copy import deepcopy
from dataclasses import asdict
from typing import Any, Literal

from omegaconf import DictConfig
from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from verl.utils.token_fields import TokenField
from verl.workers.config.keys import STRICT, read_keys

HEURISTIC, REWARD_LOOP = "heuristic", "reward_loop"
# Rollouts report for each token of a step its R_local, and how often the step was drawn.
LOCAL_REWARDS = TokenField("local_rewards", "R_local of adv_estimator=hato", unsent=0.0)
DRAWS = TokenField("draws", "adv_estimator=hato", unsent=1)


# The notes' key -> our key, each with its section.
OUR_KEYS = {
    "uncertainty.type": "uncertainty.method",
    "uncertainty.dropout_rate": "uncertainty.model_config.dropout",
    "meta_learning.type": "meta_learning.method",
    "memory.pruning_threshold": "exploration.pruning_threshold",
    "memory.max_nodes": "tree.max_nodes",
}
# uncertainty.method -> the notes' key for uncertainty.n_passes. The key of another method has no effect.
PASSES = {"dropout": "n_forward_passes", "bootstrap": "n_bootstrap"}


def in_our_names(values: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Return the values under `hato` with the keys of HATO's design notes renamed to ours, so that configs in the
    notes' form work. The YAML sets every key, so a key that holds its default does not contradict the notes' key."""
    values = deepcopy(values)
    for theirs, ours in OUR_KEYS.items():
        _rename(values, theirs, ours, defaults)
    meta = values.get("meta_learning")
    if isinstance(meta, dict) and "outer_lr" in meta:
        if meta.get("method", defaults["meta_learning"]["method"]) == "maml":
            raise ValueError(
                f"hato.meta_learning.outer_lr={meta['outer_lr']}: the outer step of maml is one of the actor's "
                "optimizer: leave it out, and set actor_rollout_ref.actor.optim.lr"
            )
        meta.pop("outer_lr")  # Reptile does not read it.
    uncertainty = values.get("uncertainty")
    if isinstance(uncertainty, dict):
        method = uncertainty.get("method", defaults["uncertainty"]["method"])
        for reader, name in PASSES.items():
            if reader == method:
                _rename(values, f"uncertainty.{name}", "uncertainty.n_passes", defaults)
            else:
                uncertainty.pop(name, None)
    return values


def _rename(values: dict, theirs: str, ours: str, defaults: dict) -> None:
    section, _, key = theirs.rpartition(".")
    *sections, our_key = ours.split(".")
    source, target = values.get(section), values
    if not isinstance(source, dict) or key not in source:
        return
    for name in sections:
        target, defaults = target.setdefault(name, {}), defaults[name]
        if not isinstance(target, dict):
            return  # the check of types reports this
    value, present = source.pop(key), target.get(our_key, defaults[our_key])
    if present not in (value, defaults[our_key]):
        raise ValueError(f"hato.{theirs}={value} is hato.{ours}={value}, and not {present}: leave out one")
    target[our_key] = value


@dataclass(frozen=True, config=STRICT)
class TreeConfig:
    """The reasoning tree of one problem.

    Args:
        max_depth: largest number of steps of a path; a node at this depth runs to the final answer.
        branching_factor: number of children of a node.
        search_algorithm: `bfs` level by level; `dfs` the deepest node first; `beam` level by level, where the best
            `max_nodes_per_level` nodes of a level are kept.
        max_nodes_per_level: largest number of kept nodes of a level.
        max_nodes: largest number of kept nodes of a tree, without the root; only they hold tokens (see train_dropped).
        step_delimiter: text that ends a step.
        max_step_tokens: largest number of tokens of a step, except the last; a longer step is cut into two.
        adaptive_branching: whether a node with a higher score gets more children, branching_factor on average.
        spread_leaves: whether a tree of n leaves and depth D has at most n^(d/D) leaves and open nodes after level d,
            so it forks on all levels; otherwise, and with dfs, it forks as early as it can.
        train_dropped: whether a step that is dropped before its answer is known becomes a row with reward 0, if the
            prompt has rows left. Dropped nodes then hold tokens, too, until the tree is complete.
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


@dataclass(frozen=True, config=STRICT)
class RewardWeights:
    """The weights of a step's reward R = alpha R_local + beta R_path + gamma R_causal; each part is in [0, 1]."""

    alpha: float = Field(default=0.1, ge=0)
    beta: float = Field(default=0.7, ge=0)
    gamma: float = Field(default=0.2, ge=0)

    def __post_init__(self):
        if self.alpha == self.beta == self.gamma == 0:
            raise ValueError("hato.reward_weights: alpha, beta and gamma: expected not all 0")


@dataclass(frozen=True, config=STRICT)
class ExplorationConfig:
    """Rules for choosing the nodes to expand, and the sampling temperature of steps.

    Args:
        beta_u: weight of the uncertainty in a node's score V + beta_u U.
        initial_temperature, temperature_decay: T0 and decay of the sampling temperature T0 exp(-decay * progress);
            progress is the finished share of the training.
        pruning_threshold: score below which a node is dropped. V estimates the share of right answers, so 0 drops none.
        selection_temperature: temperature of the softmax by which nodes are chosen; 0 chooses the best ones.
        nodes_per_tree: mean number of nodes per tree of a batch. UCB divides the nodes among the trees, at most
            max_nodes to each: problems whose steps differed in reward at their last visit get more, and so do those
            that have had few nodes. 0: every tree has max_nodes.
        ucb_coef: coefficient c of the UCB score mean + c sqrt(log(all visits) / visits).
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
    """The networks that estimate V: number of layers, units per layer, and dropout rate of the method `dropout`."""

    hidden_size: int = Field(default=64, ge=1)
    n_layers: int = Field(default=2, ge=1)
    dropout: float = Field(default=0.2, ge=0.001, le=0.999)


@dataclass(frozen=True, config=STRICT)
class UncertaintyConfig:
    """Settings of the value model, which estimates V and U of a node (value_model.py).

    Args:
        method: `ensemble`: n_models networks, each trained on its own resampling; `dropout`: n_passes masks of one
            network; `bootstrap`: n_passes resamplings of remembered outcomes; `none`: one network, U = 0.
        learning_rate, n_updates: learning rate of the networks, and number of their updates after each training step.
        entropy_top_k: number of most likely tokens from which a token's entropy is estimated; with 0 no entropy is
            computed, and the feature `mean_entropy` is 0. A vLLM server reports at most 20.
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
    """Meta-learning of the policy's parameters over domains (`data_source`).

    Args:
        method: `reptile`: theta += meta_lr (theta_inner - theta) after n_inner_steps; `maml`: first order, whose outer
            step is one of the actor's optimizer and does not read meta_lr.
        inner_lr: learning rate of maml's inner steps, by plain gradient descent; reptile uses the actor's optimizer.
    """

    enable: bool = False
    method: Literal["reptile", "maml"] = "reptile"
    meta_lr: float = Field(default=0.1, gt=0)
    inner_lr: float = Field(default=0.01, gt=0)
    n_inner_steps: int = Field(default=4, ge=1)


@dataclass(frozen=True, config=STRICT)
class MemoryConfig:
    """Size limits of the memories that grow over a run.

    Args:
        value_buffer_size: number of most recent steps that the value model remembers; with the method `bootstrap` at
            most 1024. One training step adds at most a quarter of them, drawn at random.
        reference_prompts: number of prompts whose paths of the first visit are kept for the novelty metric.
        reference_paths: number of paths kept per prompt.
        problems: number of latest problems whose share of sibling groups that varied is kept (for nodes_per_tree).
    """

    value_buffer_size: int = Field(default=8192, ge=4)
    reference_prompts: int = Field(default=1024, ge=0)
    reference_paths: int = Field(default=8, ge=1)
    problems: int = Field(default=100_000, ge=1)


@dataclass(frozen=True, config=STRICT)
class HATOConfig:
    """All settings under `hato`.

    Args:
        verification_threshold: reward above which an answer counts as right.
        path_reward: R_path of a step: the `best` or the `mean` reward of the paths through it, cut to [0, 1].
        causal_reward: R_causal of a step on a right path. `share`: the share of right answers below it minus that below
            its siblings. `notes`: as the design notes define it, the mean reward of its successful paths minus the mean
            of its siblings' such means; 0 for a leaf.
        local_reward: `heuristic`; the dotted name of a function (see local_reward.py); or `reward_loop`: verl's reward
            loop, where a process reward model can be served, scores the path up to the step, and the reward function
            finds the step's text in extra_info["hato_step"].
        train_on_local_reward_alone: whether R_local trains siblings whose beta R_path + gamma R_causal are all equal:
            its differences, however small, are normalized to full weight. With beta = gamma = 0 it always does.
            Otherwise their advantage is 0.
    """

    tree: TreeConfig = Field(default_factory=TreeConfig)
    reward_weights: RewardWeights = Field(default_factory=RewardWeights)
    exploration: ExplorationConfig = Field(default_factory=ExplorationConfig)
    uncertainty: UncertaintyConfig = Field(default_factory=UncertaintyConfig)
    meta_learning: MetaLearningConfig = Field(default_factory=MetaLearningConfig)
    memory: MemoryConfig = Field(default_factory=MemoryConfig)
    verification_threshold: float = 0.5
    path_reward: Literal["best", "mean"] = "best"
    causal_reward: Literal["share", "notes"] = "share"
    local_reward: str = HEURISTIC
    train_on_local_reward_alone: bool = False

    def __post_init__(self):
        drops = self.exploration.pruning_threshold > 0 or self.tree.search_algorithm == "beam"
        if self.tree.train_dropped and not drops:
            raise ValueError(
                "hato.tree.train_dropped=true has no effect: nothing is dropped with hato.exploration.pruning_threshold"
                f"=0 and hato.tree.search_algorithm={self.tree.search_algorithm}"
            )

    @model_validator(mode="before")
    @classmethod
    def _in_our_names(cls, values: Any) -> Any:
        """Accept the design notes' names of keys as well; raise ValueError if a key of the notes contradicts ours."""
        return in_our_names(values, asdict(cls())) if isinstance(values, dict) else values


def hato_keys(config: DictConfig) -> HATOConfig:
    """Return the settings from a run's section `hato`, which may be missing."""
    return read_keys(HATOConfig, config.get("hato"), "hato")


# The keys that the credit assignment reads, with their defaults.
REWARD_KEYS = {
    key: value
    for key, value in asdict(HATOConfig()).items()
    if key
    in ("verification_threshold", "path_reward", "causal_reward", "reward_weights", "train_on_local_reward_alone")
}
