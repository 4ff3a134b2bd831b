"""LATR's keys (arXiv 2510.24302) under `actor_rollout_ref.rollout.kt`, by their published names."""

from dataclasses import replace
from typing import Annotated, Literal, NamedTuple

from pydantic import Field
from pydantic.dataclasses import dataclass

from verl.workers.config.keys import STRICT

SECTION = "actor_rollout_ref.rollout.kt"
Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, config=STRICT)
class KTConfig:
    """Rules for branching, pruning and leaving lookahead trees. A threshold of None switches its test off.

    Branching
        max_n_branch_per_token: number of candidates per position, including the most likely token.
        prob_filter_abs_thres: probability that another candidate must exceed to open a branch.
        prob_filter_rel_thres: difference from the first candidate's probability that it must stay below.
        stop_word_filter: whether stop words, punctuation and blanks never open a branch.
        random_branching_ratio: probability with which each further candidate opens a branch, instead of the two
            thresholds; an ablation.
        sample_nk: `none`: rows grow by their most likely token; `full`: they sample while all k branches are in use;
            `always`: they sample wherever they do not branch.

    Pruning
        rollout_filter_steps: numbers of tokens after its birth at which a branch is compared with its parent.
        rollout_filter_edit_dist_thres: edit distance per token below which a branch is dropped.
        rollout_filter_suffix_match_thres, rollout_filter_rouge_l_thres: similarities above which a branch is dropped.
        keep_math_symbols: whether branches are kept where the parent took a mathematical symbol.
        cumulative_prob_filter_thres, cumulative_prob_filter_interval: threshold t and number of steps between checks.
            At step s a branch is dropped if the probability of its tokens since its birth is less than t^s times that
            of the likeliest branch. No check while all k branches are in use.
        random_pruning_ratio: share of the compared branches dropped at random, regardless of similarity; an ablation.

    Leaving the tree for ordinary sampling
        return_on_full: whether to leave once all branches are past their last comparison, and the share of the k
            branches in use reaches return_nb_thres_init - return_nb_thres_decay * step / max_new_tokens.
        force_return_step: number of steps after which the tree is left; -1: no such limit.
        fill_return_sequences: whether the root's row is repeated in place of branches that never opened.

    Over training
        mix_ratio_schedule: training step -> share of a prompt's n responses from the tree, from that step on.
        enable_param_scheduler: whether, after each training step, the thresholds are tightened by param_scheduler_step
            if the suppress ratio is above suppress_ratio_thres, and loosened if the empty-branch ratio is above
            empty_branch_ratio_thres; at most max_n_step steps in either direction.

    chunk_size is our addition: the smallest number of tokens per request. It changes the speed, never the tree.
    over_generation_factor belongs to the rollout over_generation, which samples n times this factor responses and keeps
    the n most different ones.
    """

    max_n_branch_per_token: int = Field(default=2, ge=1)
    prob_filter_abs_thres: Share | None = 0.25
    prob_filter_rel_thres: Share | None = 0.15
    stop_word_filter: bool = False
    random_branching_ratio: Share | None = None
    sample_nk: Literal["none", "full", "always"] = "none"

    rollout_filter_steps: list[Annotated[int, Field(ge=1)]] = Field(default_factory=lambda: [20, 30, 50], min_length=1)
    rollout_filter_edit_dist_thres: Share | None = 0.4
    rollout_filter_suffix_match_thres: Share | None = None
    rollout_filter_rouge_l_thres: Share | None = None
    keep_math_symbols: bool = True
    cumulative_prob_filter_thres: Annotated[float, Field(gt=0, le=1)] | None = None
    cumulative_prob_filter_interval: int = Field(default=50, ge=1)
    random_pruning_ratio: Share | None = None

    return_on_full: bool = True
    return_nb_thres_init: float = 1.0
    return_nb_thres_decay: float = 0.05
    force_return_step: int = 512
    fill_return_sequences: bool = True

    mix_ratio_schedule: dict[Annotated[int, Field(ge=0)], Share] = Field(default_factory=lambda: {0: 1.0})
    enable_param_scheduler: bool = False
    param_scheduler_step: float = 0.01
    max_n_step: int = 10
    suppress_ratio_thres: float = 0.1
    empty_branch_ratio_thres: float = 0.05

    chunk_size: int = Field(default=16, ge=1)
    over_generation_factor: float = Field(default=2.0, ge=1)

    def __post_init__(self):
        if self.force_return_step != -1 and self.force_return_step < 1:
            raise ValueError(f"{SECTION}.force_return_step={self.force_return_step}: expected at least 1, or -1: never")
        if 0 not in self.mix_ratio_schedule:
            raise ValueError(
                f"{SECTION}.mix_ratio_schedule={self.mix_ratio_schedule}: expected {{step: ratio}} with step 0"
            )


class Tightened(NamedTuple):
    """The parameter scheduler's state: number of steps by which thresholds are tightened, below 0 loosened."""

    steps: int = 0


def mix_ratio(schedule: dict[int, float], training_step: int) -> float:
    """Return the ratio of the last scheduled step reached; it depends on the step alone, so a resumed run agrees.

    >>> [mix_ratio({0: 1.0, 10: 0.75, 20: 0.5}, step) for step in (0, 9, 10, 25)]
    [1.0, 1.0, 0.75, 0.5]
    """
    return schedule[max(step for step in schedule if step <= training_step)]


def tightened(config: KTConfig, steps: int) -> KTConfig:
    """Return the config with its thresholds moved by `steps` times param_scheduler_step, clamped to [0, 1].

    Positive steps tighten, so fewer branches open and more are dropped: prob_filter_abs_thres and the edit distance's
    threshold rise; prob_filter_rel_thres and the thresholds of suffix match and ROUGE-L fall. Negative steps loosen.
    """

    def moved(value: float | None, direction: int) -> float | None:
        return None if value is None else min(max(value + direction * steps * config.param_scheduler_step, 0.0), 1.0)

    return replace(
        config,
        prob_filter_abs_thres=moved(config.prob_filter_abs_thres, 1),
        prob_filter_rel_thres=moved(config.prob_filter_rel_thres, -1),
        rollout_filter_edit_dist_thres=moved(config.rollout_filter_edit_dist_thres, 1),
        rollout_filter_suffix_match_thres=moved(config.rollout_filter_suffix_match_thres, -1),
        rollout_filter_rouge_l_thres=moved(config.rollout_filter_rouge_l_thres, -1),
    )


def next_tightened_steps(config: KTConfig, steps: int, suppress_ratio: float, empty_branch_ratio: float) -> int:
    """Return the number of steps for `tightened` after a training step, within max_n_step in either direction; both
    ratios are means over the trees."""
    if suppress_ratio > config.suppress_ratio_thres:
        steps += 1
    if empty_branch_ratio > config.empty_branch_ratio_thres:
        steps -= 1
    return min(max(steps, -config.max_n_step), config.max_n_step)
