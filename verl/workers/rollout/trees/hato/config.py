"""The keys under `hato`, typed: a wrong key, type or range ends in one line that names it.

>>> HATOConfig.from_dict({"tree": {"max_depth": 0}})
Traceback (most recent call last):
ValueError: hato.tree.max_depth=0: expected at least 1
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, ClassVar, get_type_hints

SEARCH_ALGORITHMS = ("bfs", "dfs", "beam")
UNCERTAINTY_METHODS = ("ensemble", "dropout", "bootstrap", "none")
META_METHODS = ("reptile", "maml")
PATH_REWARDS = ("best", "mean")
HEURISTIC, REWARD_LOOP = "heuristic", "reward_loop"


def _number(default, low: float | None = None, high: float | None = None, above: float | None = None) -> Any:
    """A field within [low, high], or greater than `above`."""
    return field(default=default, metadata={"low": low, "high": high, "above": above})


def _choice(default: str, options: tuple[str, ...]) -> Any:
    return field(default=default, metadata={"options": options})


@dataclass(frozen=True, kw_only=True)
class _Section:
    KEY: ClassVar[str]

    def __post_init__(self):
        types = get_type_hints(type(self))
        for key_field in fields(self):
            key, value = f"{self.KEY}.{key_field.name}", getattr(self, key_field.name)
            _check_type(key, value, types[key_field.name])
            _check_range(key, value, **key_field.metadata)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]):
        """Builds the section and those inside it.

        Raises:
            ValueError: an unknown key, a wrong type, or a value out of range; names the key.
        """
        if not isinstance(values, Mapping):
            raise ValueError(f"{cls.KEY}={values!r}: expected a mapping of keys")
        types = get_type_hints(cls)
        known = [key_field.name for key_field in fields(cls)]
        if unknown := sorted(set(values) - set(known)):
            raise ValueError(f"{cls.KEY} has no key {', '.join(unknown)}; known: {', '.join(known)}")
        return cls(
            **{
                name: types[name].from_dict(value) if is_dataclass(types[name]) else value
                for name, value in values.items()
            }
        )


def _check_type(key: str, value: Any, expected: type) -> None:
    # a whole number is a float to YAML's users, True is not a number
    accepted = (int, float) if expected is float else expected
    if not isinstance(value, accepted) or (isinstance(value, bool) and expected is not bool):
        raise ValueError(f"{key}={value!r}: expected {expected.__name__}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{key}={value}: expected a finite number")


def _check_range(key: str, value, low=None, high=None, above=None, options=None) -> None:
    if options is not None and value not in options:
        raise ValueError(f"{key}={value}: expected one of {', '.join(options)}")
    if above is not None and not value > above:
        raise ValueError(f"{key}={value}: expected a number above {above}")
    if (low is not None and value < low) or (high is not None and value > high):
        expected = f"at least {low}" if high is None else f"a number from {low} to {high}"
        raise ValueError(f"{key}={value}: expected {expected}")


@dataclass(frozen=True, kw_only=True)
class TreeConfig(_Section):
    """The reasoning tree of one problem.

    Args:
        max_depth: steps of the longest path; a node at this depth runs to the final answer.
        branching_factor: children of a node.
        search_algorithm: `bfs` level by level; `dfs` the deepest node first; `beam` level by level, of which the best
            `max_nodes_per_level` are kept.
        max_nodes_per_level: kept nodes of a level.
        max_nodes: kept nodes of a tree, the root not counted; only they hold tokens.
        step_delimiter: text that ends a step.
        max_step_tokens: a longer step is cut into two; the last step, to the final answer, has no such bound.
        adaptive_branching: the number of children follows a node's promise, branching_factor on average.
        spread_leaves: a tree of n leaves and depth D has n^(d/D) ends at most after level d, so that it forks on all
            levels; else, and with dfs, it forks as early as it can.
    """

    KEY: ClassVar[str] = "hato.tree"

    max_depth: int = _number(4, low=1)
    branching_factor: int = _number(3, low=1)
    search_algorithm: str = _choice("bfs", SEARCH_ALGORITHMS)
    max_nodes_per_level: int = _number(16, low=1)
    max_nodes: int = _number(128, low=1)
    step_delimiter: str = "\n\n"
    max_step_tokens: int = _number(256, low=1)
    adaptive_branching: bool = False
    spread_leaves: bool = True

    def __post_init__(self):
        super().__post_init__()
        if not self.step_delimiter:
            raise ValueError(f"{self.KEY}.step_delimiter='': expected a text that ends a step")


@dataclass(frozen=True, kw_only=True)
class RewardWeights(_Section):
    """R = alpha R_local + beta R_path + gamma R_causal; each part is in [0, 1]."""

    KEY: ClassVar[str] = "hato.reward_weights"

    alpha: float = _number(0.1, low=0)
    beta: float = _number(0.7, low=0)
    gamma: float = _number(0.2, low=0)

    def __post_init__(self):
        super().__post_init__()
        if self.alpha == self.beta == self.gamma == 0:
            raise ValueError(f"{self.KEY}: alpha, beta and gamma: expected not all 0")


@dataclass(frozen=True, kw_only=True)
class ExplorationConfig(_Section):
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

    KEY: ClassVar[str] = "hato.exploration"

    beta_u: float = _number(0.5, low=0)
    initial_temperature: float = _number(1.0, above=0)
    temperature_decay: float = _number(0.1, low=0)
    pruning_threshold: float = _number(0.0, low=0, high=1)
    selection_temperature: float = _number(0.25, low=0)
    nodes_per_tree: int = _number(0, low=0)
    ucb_coef: float = _number(1.0, low=0)


@dataclass(frozen=True, kw_only=True)
class ValueModelConfig(_Section):
    """Networks that estimate V: layers, their width, and the share of hidden units that the method `dropout` drops."""

    KEY: ClassVar[str] = "hato.uncertainty.model_config"

    hidden_size: int = _number(64, low=1)
    n_layers: int = _number(2, low=1)
    dropout: float = _number(0.2, low=0.001, high=0.999)


@dataclass(frozen=True, kw_only=True)
class UncertaintyConfig(_Section):
    """V and U of a node (value_model.py).

    Args:
        method: `ensemble`: n_models networks, each trained on its own resampling; `dropout`: n_passes masks of one
            network; `bootstrap`: n_passes resamplings of remembered outcomes; `none`: one network, U = 0.
        learning_rate, n_updates: of the networks, and their updates after each training step.
        entropy_top_k: a token's entropy is estimated from so many most likely tokens; 0: none is asked for, and the
            feature `mean_entropy` is 0. A vLLM server reports 20 at most.
    """

    KEY: ClassVar[str] = "hato.uncertainty"

    method: str = _choice("ensemble", UNCERTAINTY_METHODS)
    n_models: int = _number(5, low=1)
    n_passes: int = _number(10, low=1)
    model_config: ValueModelConfig = field(default_factory=ValueModelConfig)
    learning_rate: float = _number(3e-3, above=0)
    n_updates: int = _number(30, low=1)
    entropy_top_k: int = _number(10, low=0, high=20)

    def __post_init__(self):
        super().__post_init__()
        estimates = {"ensemble": "n_models", "dropout": "n_passes", "bootstrap": "n_passes"}.get(self.method)
        if estimates and getattr(self, estimates) < 2:
            raise ValueError(f"{self.KEY}.{estimates}=1: expected at least 2 for {self.KEY}.method={self.method}")


@dataclass(frozen=True, kw_only=True)
class MetaLearningConfig(_Section):
    """Over domains (`data_source`), on the policy's parameters.

    Args:
        method: `reptile`: theta += meta_lr (theta_inner - theta) after n_inner_steps; `maml`: first order.
        inner_lr: of maml's inner steps, plain gradient descent; reptile's are the actor's optimizer's.
    """

    KEY: ClassVar[str] = "hato.meta_learning"

    enable: bool = False
    method: str = _choice("reptile", META_METHODS)
    meta_lr: float = _number(0.1, above=0)
    inner_lr: float = _number(0.01, above=0)
    n_inner_steps: int = _number(4, low=1)


@dataclass(frozen=True, kw_only=True)
class MemoryConfig(_Section):
    """Bounds of what grows over a run.

    Args:
        value_buffer_size: steps that the value model remembers, the newest ones; of a training step a quarter of it at
            most, drawn at random.
        reference_prompts: prompts of which the paths of the first visit are kept for the novelty metric.
        reference_paths: of each.
        problems: of which the share of sibling groups that varied is kept (for nodes_per_tree); the oldest go first.
    """

    KEY: ClassVar[str] = "hato.memory"

    value_buffer_size: int = _number(8192, low=4)
    reference_prompts: int = _number(1024, low=0)
    reference_paths: int = _number(8, low=1)
    problems: int = _number(100_000, low=1)


@dataclass(frozen=True, kw_only=True)
class HATOConfig(_Section):
    """Everything under `hato`.

    Args:
        verification_threshold: a reward above it counts as a right answer.
        path_reward: R_path of a step is the `best` reward below it, cut to [0, 1], or their `mean`.
        local_reward: `heuristic`; the dotted name of a function (see local_reward.py); or `reward_loop`: upstream's
            reward loop, where a process reward model can be served, scores the path up to the step, and the reward
            function finds the step's text in extra_info["hato_step"].
        train_on_local_reward_alone: whether siblings whose beta R_path + gamma R_causal are all equal are trained by
            R_local: its differences, however small, are normalized to full weight. With beta = gamma = 0 they always
            are. False: their advantage is 0.
    """

    KEY: ClassVar[str] = "hato"

    tree: TreeConfig = field(default_factory=TreeConfig)
    reward_weights: RewardWeights = field(default_factory=RewardWeights)
    exploration: ExplorationConfig = field(default_factory=ExplorationConfig)
    uncertainty: UncertaintyConfig = field(default_factory=UncertaintyConfig)
    meta_learning: MetaLearningConfig = field(default_factory=MetaLearningConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    verification_threshold: float = 0.5
    path_reward: str = _choice("best", PATH_REWARDS)
    local_reward: str = HEURISTIC
    train_on_local_reward_alone: bool = False

    def __post_init__(self):
        super().__post_init__()
        if self.reward_weights.alpha == 0 and self.local_reward != HEURISTIC:
            raise ValueError(f"hato.local_reward={self.local_reward} has no effect: hato.reward_weights.alpha is 0")
