"""CURE (arXiv 2508.11016, first stage): responses that are continued again from one of their critical tokens.

    n1 responses are sampled from the prompt
    in each, one of its `critical_top_k` tokens with the highest entropy is drawn at random
    n2 further trajectories begin with the tokens before it, and continue to the end

That gives n1 (1 + n2) trajectories. A response's first token, special tokens, tokens with a short text, and a tool's
result are never critical. Where a response has no critical token, the prompt is continued instead.

The defaults are those of the published script. Where the published code differs:
- It treats prompt and prefix as one prompt, cuts that at the prompt's length limit, and gives a continuation the full
  length of a response. Here the prefix is part of the response: the length limit and the reward count the whole.
- It also ranks the entropies of padding, and computes entropies in a pass of the actor. Here the engine reports them.

The second stage of the paper is an ordinary run (tree=plain) from the first one's checkpoint.
"""

import random
from collections.abc import Callable, Sequence
from heapq import nlargest
from statistics import fmean

from pydantic import Field
from pydantic.dataclasses import dataclass

from verl.utils.parts import register_tree
from verl.workers.config.keys import ROLLOUT, STRICT, check_log_probs
from verl.workers.rollout.engines.interface import gather_or_cancel
from verl.workers.rollout.trajectory_tree import Segment, first_tokens
from verl.workers.rollout.tree_builder import BranchPolicy, Path, TreeBuilder, derived_seed, token_text


@dataclass(frozen=True, config=STRICT)
class CUREKeys:
    """Keys under actor_rollout_ref.rollout.custom.cure.

    Args:
        n1: number of responses that start from the prompt.
        n2: number of continuations of each response.
        critical_top_k: number of tokens with the highest entropy, among which one is drawn.
        min_characters: smallest number of characters of a critical token, without spaces around it.
        entropy_top_k: number of most likely tokens from which a token's entropy is estimated.
    """

    n1: int = Field(default=4, ge=1)
    n2: int = Field(default=3, ge=0)
    critical_top_k: int = Field(default=20, ge=1)
    min_characters: int = Field(default=2, ge=1)
    entropy_top_k: int = Field(default=20, ge=1)


@register_tree(
    "cure",
    "CURE (arXiv 2508.11016): responses are continued anew from before one of their tokens with the highest entropy",
    keys=CUREKeys,
    trajectories=lambda keys: keys.n1 * (1 + keys.n2),
    formula="n1 (1 + n2)",
    smallest={"n1": 2, "n2": 2},
    scaled_by="n1",
)
class Policy(BranchPolicy):
    """The policy of `tree=cure`; `text_of` returns a token's text, and an empty one for a special token."""

    @classmethod
    def from_config(cls, config, tokenizer=None) -> "Policy":
        keys = cls.part.read(config)
        check_log_probs(config.actor_rollout_ref.rollout, f"{ROLLOUT}.custom.cure.entropy_top_k", keys.entropy_top_k)
        return cls(keys, token_text(tokenizer, skip_special_tokens=True))

    async def grow(self, builder: TreeBuilder, n: int) -> None:
        grown = await gather_or_cancel(*(self._tree(builder, number) for number in range(self.keys.n1)))
        builder.tree.leaves = [leaf for leaves, _ in grown for leaf in leaves]
        entropies = [entropy for _, entropy in grown if entropy is not None]
        builder.tree.metrics = {
            "shared_tokens": builder.tree.shared_tokens(),
            "critical_tokens": float(len(entropies)),
            "critical_token_entropy": fmean(entropies or [0.0]),
        }

    async def _tree(self, builder: TreeBuilder, number: int) -> tuple[list[int], float | None]:
        """Return the leaves of a response and its continuations, and the critical token's entropy; None without one."""
        seeds = random.Random(derived_seed(builder.seed, number))
        response = await builder.finish(Path(), seeds.getrandbits(31), n_entropy=self.keys.entropy_top_k)
        entropies = self._critical_entropies(response, builder.is_end)
        position = seeds.choice(list(entropies)) if entropies else 0
        head, tail = first_tokens(response, position), tokens_from(response, position)
        path = Path.of(head)
        rest = await gather_or_cancel(*(builder.finish(path, seeds.getrandbits(31)) for _ in range(self.keys.n2)))
        for segment in response:
            segment.info.entropies = None
        fork = builder.tree.add_chain(None, head) if head else None
        return [builder.tree.add_chain(fork, segments) for segments in (tail, *rest)], entropies.get(position)

    def _critical_entropies(self, response: Sequence[Segment], is_end: Callable[[int], bool]) -> dict[int, float]:
        """Return the positions of the critical tokens in a response, with their entropies in nats."""
        tokens = [token for segment in response for token in segment.token_ids]
        entropies = [e for segment in response for e in segment.info.entropies or [None] * len(segment.token_ids)]
        allowed = {
            position: entropy
            for position, (token, entropy) in enumerate(zip(tokens, entropies, strict=True))
            if position > 0
            and entropy is not None
            and not is_end(token)
            and len(self.text_of(token).strip()) >= self.keys.min_characters
        }
        return dict(nlargest(self.keys.critical_top_k, allowed.items(), key=lambda item: item[1]))


def tokens_from(segments: Sequence[Segment], position: int) -> list[Segment]:
    """Return the segments without their first `position` tokens; the first remaining segment may be shortened."""
    rest = []
    for segment in segments:
        if position < len(segment.token_ids):
            rest.append(segment.part(position))
        position = max(0, position - len(segment.token_ids))
    return rest
