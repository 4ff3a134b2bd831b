"""Which versions of the weights have made the tokens of a prompt's tree.

With an asynchronous schedule a tree grows while the policy learns: some requests end before an update, others after
it, and one that is interrupted has parts of both.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from verl.workers.rollout.engines.interface import Generation
from verl.workers.rollout.trajectory_tree import common_prefix

OLDEST, NEWEST = "min_global_steps", "max_global_steps"  # upstream's names


class Part(NamedTuple):
    """The tokens of a request that one version of the weights has made.

    Args:
        context: hash of the tokens before them.
        tokens: the tokens.
        version: the training step after which the weights were sent.
    """

    context: int
    tokens: tuple[int, ...]
    version: int


class WeightVersions:
    """Of one prompt's requests.

    >>> versions = WeightVersions()
    >>> versions.add([7], Generation([1, 2, 3], [], versions=[(2, 4), (1, 5)]))
    >>> versions.of([7, 1, 2, 3]), versions.of([7, 1, 9])
    ({'min_global_steps': 4, 'max_global_steps': 5}, {'min_global_steps': 4, 'max_global_steps': 4})
    """

    def __init__(self):
        self.parts: dict[int, set[Part]] = defaultdict(set)  # by the number of tokens before
        self.seen: set[int] = set()

    def add(self, prompt_ids: Sequence[int], generation: Generation) -> None:
        """Remember a request's tokens: `generation` continues `prompt_ids`."""
        tokens, start = list(prompt_ids), 0
        for n_tokens, version in generation.versions:
            part = generation.token_ids[start : start + n_tokens]
            self.parts[len(tokens)].add(Part(hash(tuple(tokens)), tuple(part), version))
            self.seen.add(version)
            tokens += part
            start += n_tokens

    def of(self, tokens: Sequence[int], mask: Sequence[int] | None = None) -> dict[str, int]:
        """Return the oldest and the newest version that made a token of this trajectory; empty for an engine without.

        Of requests that continue the same tokens, those count that agree with it longest: all of them, where only their
        beginning is in it, or where its next token was chosen among their candidates.

        Args:
            tokens: the prompt's and the response's.
            mask: 0 for each token of the response that the policy has not chosen, as a tool's; None: it chose all.
        """
        versions = self.seen if len(self.seen) < 2 else self._of_its_own(tokens, mask) or self.seen
        return {OLDEST: min(versions), NEWEST: max(versions)} if versions else {}

    def _of_its_own(self, tokens: Sequence[int], mask: Sequence[int] | None) -> set[int]:
        versions: set[int] = set()
        chosen = [1] * len(tokens) if mask is None else [0] * (len(tokens) - len(mask)) + list(mask)
        explained = 0  # tokens before this one are known to be of a request, or of the prompt
        for start in sorted(start for start in self.parts if start < len(tokens)):
            context = hash(tuple(tokens[:start]))
            parts = [part for part in self.parts[start] if part.context == context]
            shared = {part: common_prefix(part.tokens, tokens[start:]) for part in parts}
            most = max(shared.values(), default=0)
            if most > 0 or chosen[start] and start >= explained:
                versions |= {part.version for part, n in shared.items() if n == most}
                explained = max(explained, start + most)
        return versions

    def metrics(self) -> dict[str, float]:
        """With how many versions of the weights the tree has been grown."""
        return {"weight_versions": float(len(self.seen))} if self.seen else {}
