"""LATR's keys (arXiv 2510.24302) under `actor_rollout_ref.rollout.kt`, by their published names."""

from dataclasses import dataclass, field

SAMPLE_NK = ("none", "full", "always")
SHARES = (
    "prob_filter_abs_thres",
    "prob_filter_rel_thres",
    "random_branching_ratio",
    "rollout_filter_edit_dist_thres",
    "rollout_filter_suffix_match_thres",
    "rollout_filter_rouge_l_thres",
    "random_pruning_ratio",
)


@dataclass
class KTConfig:
    """How lookahead trees branch, are pruned, and are left. A threshold of None switches its test off.

    Branching
        max_n_branch_per_token: candidates looked at per token, the most likely one included.
        prob_filter_abs_thres: another candidate opens a branch when its probability is above this …
        prob_filter_rel_thres: … and less than this below the first one's.
        stop_word_filter: never branch to stop words, punctuation and blanks.
        random_branching_ratio: ablation; instead of the two thresholds, each further candidate opens a branch with
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

    max_n_branch_per_token: int = 2
    prob_filter_abs_thres: float | None = 0.25
    prob_filter_rel_thres: float | None = 0.15
    stop_word_filter: bool = False
    random_branching_ratio: float | None = None
    sample_nk: str = "none"

    rollout_filter_steps: list[int] = field(default_factory=lambda: [20, 30, 50])
    rollout_filter_edit_dist_thres: float | None = 0.4
    rollout_filter_suffix_match_thres: float | None = None
    rollout_filter_rouge_l_thres: float | None = None
    keep_math_symbols: bool = True
    cumulative_prob_filter_thres: float | None = None
    cumulative_prob_filter_interval: int = 50
    random_pruning_ratio: float | None = None

    return_on_full: bool = True
    return_nb_thres_init: float = 1.0
    return_nb_thres_decay: float = 0.05
    force_return_step: int = 512
    fill_return_sequences: bool = True

    mix_ratio_schedule: dict[int, float] = field(default_factory=lambda: {0: 1.0})
    enable_param_scheduler: bool = False
    param_scheduler_step: float = 0.01
    max_n_step: int = 10
    suppress_ratio_thres: float = 0.1
    empty_branch_ratio_thres: float = 0.05

    chunk_size: int = 16
    over_generation_factor: float = 2.0

    def __post_init__(self):
        self.mix_ratio_schedule = {int(step): float(ratio) for step, ratio in dict(self.mix_ratio_schedule).items()}
        self.rollout_filter_steps = [int(r) for r in self.rollout_filter_steps]
        for name in SHARES:
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise self._error(name, "from 0 to 1, or null")
        for name in ("max_n_branch_per_token", "chunk_size", "cumulative_prob_filter_interval"):
            if getattr(self, name) < 1:
                raise self._error(name, "at least 1")
        if self.over_generation_factor < 1:
            raise self._error("over_generation_factor", "at least 1")
        if self.sample_nk not in SAMPLE_NK:
            raise self._error("sample_nk", f"one of {', '.join(SAMPLE_NK)}")
        if not self.rollout_filter_steps or min(self.rollout_filter_steps) < 1:
            raise self._error("rollout_filter_steps", "a list of numbers of tokens, each at least 1")
        if self.force_return_step != -1 and self.force_return_step < 1:
            raise self._error("force_return_step", "at least 1, or -1 for never")
        if self.cumulative_prob_filter_thres is not None and not 0 < self.cumulative_prob_filter_thres <= 1:
            raise self._error("cumulative_prob_filter_thres", "above 0, at most 1, or null")
        schedule = self.mix_ratio_schedule
        if 0 not in schedule or not all(step >= 0 and 0 <= ratio <= 1 for step, ratio in schedule.items()):
            raise self._error("mix_ratio_schedule", "{step: ratio} with step 0 and ratios from 0 to 1")

    def _error(self, name: str, expected: str) -> ValueError:
        return ValueError(f"actor_rollout_ref.rollout.kt.{name}={getattr(self, name)}: expected {expected}")
