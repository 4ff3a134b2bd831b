"""LATR's keys (arXiv 2510.24302) under `actor_rollout_ref.rollout.kt`, by their published names."""

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from verl.workers.config.keys import STRICT

SECTION = "actor_rollout_ref.rollout.kt"
Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, config=STRICT)
class KTConfig:
    """How lookahead trees branch, are pruned, and are left. A threshold of None switches its test off.

    Branching
        max_n_branch_per_token: most likely tokens looked at per position, the most likely one included.
        prob_filter_abs_thres: another token opens a branch when its probability is above this …
        prob_filter_rel_thres: … and less than this below the first one's.
        stop_word_filter: never branch to stop words, punctuation and blanks.
        random_branching_ratio: ablation; instead of the two thresholds, each further token opens a branch with
            this probability.
        sample_nk: `none`: rows grow by their most likely token; `full`: they sample while no branch is free;
            `always`: they sample wherever they do not branch.

    Pruning
        rollout_filter_steps: how many tokens after its birth a branch is compared with its parent.
        rollout_filter_edit_dist_thres: dropped when edit distance / tokens is below.
        rollout_filter_suffix_match_thres, rollout_filter_rouge_l_thres: dropped when the similarity is above.
        keep_math_symbols: branches where the parent took a mathematical symbol are kept.
        cumulative_prob_filter_thres, cumulative_prob_filter_interval: every so many steps, unless all branches are in
            use, drop branches that are less likely than the likeliest by more than the threshold per token.
        random_pruning_ratio: ablation; instead of the similarities, this share of the compared branches is dropped.

    Leaving the tree for ordinary sampling
        return_on_full: leave when the branches in use reach return_nb_thres_init - return_nb_thres_decay * step /
            max_new_tokens of all, and all are past their last comparison.
        force_return_step: leave after this many steps; -1: never.
        fill_return_sequences: branches that never were are filled by repeating the root.

    Over training
        mix_ratio_schedule: training step -> share of a prompt's n responses that come from the tree, from then on.
        enable_param_scheduler: after each training step, tighten the thresholds by param_scheduler_step when the
            suppress ratio is above suppress_ratio_thres, loosen them when the empty-branch ratio is above
            empty_branch_ratio_thres, at most max_n_step steps in either direction.

    chunk_size is ours: the fewest tokens that are asked from the engine at once. It changes the speed, never the tree.
    over_generation_factor belongs to the rollout over_generation: so many times n responses are sampled, the n most
    different are kept.
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
