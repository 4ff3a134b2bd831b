"""Which versions of the weights have made the tokens of a prompt's tree.

With an asynchronous schedule a tree grows while the policy learns: some requests end before an update, others after
it, and one that is interrupted has parts of both.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from verl.workers.rollout.rollout_engine import Generation

OLDEST, NEWEST = "min_global_steps", "max_global_steps"  # upstream's names


class Part(NamedTuple):
    """What a version of the weights has made of a request.

    Args:
        context: hash of the tokens before it.
        first: its first token.
        version: of the weights: the training step after which they were sent.
    """

    context: int
    first: int
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
            self.parts[len(tokens)].add(Part(hash(tuple(tokens)), part[0], version))
            self.seen.add(version)
            tokens += part
            start += n_tokens

    def of(self, tokens: Sequence[int]) -> dict[str, int]:
        """The oldest and the newest version that has made a token of this trajectory; empty for an engine without.

        A token that several requests have made counts for all of them.

        Args:
            tokens: the prompt's and the response's.
        """
        versions = self.seen if len(self.seen) < 2 else self._of_its_own(tokens) or self.seen
        return {OLDEST: min(versions), NEWEST: max(versions)} if versions else {}

    def _of_its_own(self, tokens: Sequence[int]) -> set[int]:
        return {
            part.version
            for start, parts in self.parts.items()
            if start < len(tokens)
            for context in [hash(tuple(tokens[:start]))]
            for part in parts
            if part.context == context and part.first == tokens[start]
        }

    def metrics(self) -> dict[str, float]:
        """With how many versions of the weights the tree has been grown."""
        return {"weight_versions": float(len(self.seen))} if self.seen else {}
