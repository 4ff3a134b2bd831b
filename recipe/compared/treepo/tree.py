"""TreePO (arXiv 2508.17445, algorithm 1): trajectories that grow in rounds of equal length and fork after each round.

    round      each live trajectory goes on by at most `segment_length` tokens of the model; some trajectories end
    fork       min(n - ended, divergence (live + just ended)) continuations are split evenly among the live ones; the
               last one gets the remainder
    fallback   when none is live and fewer than n have ended, each ended trajectory, in random order, is cut at the
               start of a random round and continued `divergence` times, until n places are taken

A trajectory ends with an end token, at the limits of length, depth or calls, or when a round repeats itself.

The defaults are the paper's, for rollout.n=16. Where the published code differs:
- Its number of first trajectories is always 2: the key that asks for 2 to 8 stands in a section that nothing reads.
- It looks for a boxed answer, in the current round only. Here the end token says that a trajectory has ended.
- It counts overlapping repetitions, so that a line of 39 dashes ends a trajectory. Here they may not overlap.
- It falls back only to trajectories with an end token or a boxed answer, and to the prompt where there is none.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence

from pydantic import Field
from pydantic.dataclasses import dataclass

from verl.utils.parts import register_tree
from verl.workers.config.keys import STRICT
from verl.workers.rollout.engines.interface import gather_or_cancel
from verl.workers.rollout.trajectory_tree import MODEL, TOOL, Segment, path_to
from verl.workers.rollout.tree_builder import BranchPolicy, TreeBuilder, derived_seed

Rounds = tuple[int, ...]  # a trajectory: the index of the last segment of each of its rounds


@dataclass(frozen=True, config=STRICT)
class TreePOKeys:
    """Keys under actor_rollout_ref.rollout.custom.treepo. The number of trajectories is actor_rollout_ref.rollout.n.

    Args:
        segment_length: largest number of tokens that the model writes in a round.
        max_depth: largest number of rounds of a trajectory.
        divergence: number of continuations of a live trajectory while there are places for them.
        first_round_divergence: largest number of trajectories that start from the prompt. The number is drawn for each
            prompt, from `divergence` on.
        repetition_length: number of characters of a text whose repetition ends a trajectory.
        repetition_count: number of occurrences of one such text that make a round the last one; 0 for no check.
    """

    segment_length: int = Field(default=512, ge=1)
    max_depth: int = Field(default=14, ge=1)
    divergence: int = Field(default=2, ge=1)
    first_round_divergence: int = Field(default=8, ge=1)
    repetition_length: int = Field(default=32, ge=1)
    repetition_count: int = Field(default=8, ge=0)

    def __post_init__(self):
        if self.first_round_divergence < self.divergence:
            raise ValueError(
                f"first_round_divergence={self.first_round_divergence}: expected at least divergence={self.divergence}"
            )


@register_tree(
    "treepo",
    "TreePO (arXiv 2508.17445): trajectories grow in rounds of equal length and fork after each round",
    keys=TreePOKeys,
    smallest={"segment_length": 4, "max_depth": 6, "first_round_divergence": 2},
)
class Policy(BranchPolicy):
    """The policy of `tree=treepo`; `decode` returns the text of tokens."""

    def __init__(self, keys: TreePOKeys, decode: Callable[[Sequence[int]], str]):
        self.keys, self.decode = keys, decode

    @classmethod
    def from_config(cls, config, tokenizer=None) -> "Policy":
        return cls(cls.part.read(config), lambda tokens: tokenizer.decode(tokens))

    async def grow(self, builder: TreeBuilder, n: int) -> None:
        divergence, draws = self.keys.divergence, random.Random(derived_seed(builder.seed, "treepo"))
        live: list[Rounds] = [()] * min(n, draws.randint(divergence, self.keys.first_round_divergence))
        ended: list[Rounds] = []
        number = fallbacks = 0
        while live:
            grown = await gather_or_cancel(*(self._round(builder, x, (number, i)) for i, x in enumerate(live)))
            ended_before = len(ended)
            going_on: list[Rounds] = []
            for rounds, (segments, is_last) in zip(live, grown, strict=True):
                (ended if is_last else going_on).append((*rounds, builder.tree.add_chain(_end(rounds), segments)))
            places = n - len(ended)
            if going_on:
                live = _fork(going_on, min(places, divergence * (len(going_on) + len(ended) - ended_before)))
            else:
                starts = [rounds[: draws.randrange(len(rounds))] for rounds in draws.sample(ended, len(ended))]
                live = [start for start in starts for _ in range(divergence)][:places]
                fallbacks += len(live)
            number += 1
        builder.tree.leaves = [rounds[-1] for rounds in ended]
        builder.tree.metrics = {"shared_tokens": builder.tree.shared_tokens(), "fallbacks": float(fallbacks)}

    async def _round(self, builder: TreeBuilder, rounds: Rounds, key: tuple[int, int]) -> tuple[list[Segment], bool]:
        """Return the segments of a trajectory's next round, and whether it is the last. `key` is part of its seed."""
        path = path_to(builder.tree, _end(rounds))
        segments: list[Segment] = []
        ended, tokens_left = None, self.keys.segment_length
        while tokens_left and ended is None:
            seed = derived_seed(builder.seed, *key, len(segments))
            then = await builder.advance(path, seed=seed, max_tokens=tokens_left)
            segments, path, ended = segments + then.segments, then.path, then.ended
            tokens_left -= len(then.segments[0].token_ids)
        is_last = ended is not None or len(rounds) + 1 == self.keys.max_depth or self._repeats(segments)
        if is_last and segments[-1].author == TOOL:  # no token of the model follows this result
            segments.pop()
        return segments, is_last

    def _repeats(self, segments: Sequence[Segment]) -> bool:
        """Return whether a text of `repetition_length` characters occurs `repetition_count` times in the segments."""
        length, count = self.keys.repetition_length, self.keys.repetition_count
        text = self.decode([token for s in segments if s.author == MODEL for token in s.token_ids])
        pieces = Counter(text[i : i + length] for i in range(len(text) - length + 1))
        return count > 0 and any(n >= count and text.count(piece) >= count for piece, n in pieces.items())


def _end(rounds: Rounds) -> int | None:
    return rounds[-1] if rounds else None


def _fork(live: list[Rounds], places: int) -> list[Rounds]:
    """Return a trajectory for each place: each live one equally often, the last one also for the remainder."""
    share, remainder = divmod(places, len(live))
    return [rounds for rounds in live for _ in range(share)] + live[-1:] * remainder
