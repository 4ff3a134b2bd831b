"""Over-generation, an ablation of LATR: sample more than n responses independently, keep the n most different ones.

`tree=over_generation`, with `actor_rollout_ref.rollout.kt.over_generation_factor`.
"""

import math
import random
from collections.abc import Sequence

from rapidfuzz.distance import Levenshtein

from recipe.latr.keys import SECTION, KTConfig
from verl.utils.parts import register_tree
from verl.workers.config.keys import ROLLOUT, read_keys
from verl.workers.rollout.engines.interface import gather_or_cancel
from verl.workers.rollout.tree_builder import BranchPolicy, Path, TreeBuilder


def most_diverse(responses: Sequence[Sequence[int]], n: int) -> list[int]:
    """Return the indices of n responses, ascending: the first, then always the one farthest from all chosen ones.

    The distance is Levenshtein's, divided by the longer length; among equals the first wins. This greedy farthest-point
    selection is at most twice as bad as the best choice (Gonzalez 1985).
    """
    chosen: list[int] = []
    nearest = [math.inf] * len(responses)
    while len(chosen) < n:
        at = max((i for i in range(len(responses)) if i not in chosen), key=lambda i: nearest[i])
        chosen.append(at)
        distances = [Levenshtein.normalized_distance(responses[at], response) for response in responses]
        nearest = [min(pair) for pair in zip(nearest, distances, strict=True)]
    return sorted(chosen)


@register_tree(
    "over_generation",
    "More responses than n, of which the n most different are kept; rollout.kt.over_generation_factor says how many",
    values={f"{ROLLOUT}.kt.over_generation_factor": 2.0},
    rollout_names=("over_generation",),
)
class Policy(BranchPolicy):
    """The policy of `tree=over_generation`: it samples round(n * factor) responses and keeps n of them."""

    def __init__(self, factor: float):
        self.factor = factor

    @classmethod
    def from_config(cls, config, tokenizer=None) -> "Policy":
        return cls(read_keys(KTConfig, config.actor_rollout_ref.rollout.kt, SECTION).over_generation_factor)

    async def grow(self, builder: TreeBuilder, n: int) -> None:
        tree, seeds = builder.tree, random.Random(builder.seed)
        drawn = range(max(n, round(n * self.factor)))
        samples = await gather_or_cancel(*(builder.finish(Path(), seeds.getrandbits(31)) for _ in drawn))
        responses = [[token for segment in sample for token in segment.token_ids] for sample in samples]
        leaves = [tree.insert(None, sample) for sample in samples]
        tree.leaves = [leaves[i] for i in most_diverse(responses, n)]
        returned = {i for leaf in tree.leaves for i in tree.path(leaf)}
        for i, segment in enumerate(tree.segments):
            if i not in returned:
                segment.info.notes["pruned"] = "less diverse"
        kept = sum(len(tokens) for tokens in tree.trajectories())
        tree.metrics = {"kept_token_share": kept / sum(map(len, responses)) if any(responses) else 1.0}
