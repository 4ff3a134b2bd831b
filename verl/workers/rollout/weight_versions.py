"""Records which versions of the weights made the tokens of a prompt's tree.

With an asynchronous schedule a tree grows while the policy learns: some requests end before an update, others after
it, and an interrupted request has tokens from both versions.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from verl.workers.rollout.engines.interface import Generation
from verl.workers.rollout.trajectory_tree import common_prefix

OLDEST, NEWEST = "min_global_steps", "max_global_steps"  # upstream's names


class Part(NamedTuple):
    """Consecutive tokens of one request that one version of the weights, a training step's, made."""

    context: int  # hash of the tokens before `tokens`
    tokens: tuple[int, ...]
    version: int


class WeightVersions:
    """The versions of the weights that served one prompt's requests; below, versions 4 and 5 made parts of one request.

    >>> versions = WeightVersions()
    >>> versions.add([7], Generation([1, 2, 3], [], versions=[(2, 4), (1, 5)]))
    >>> versions.of([7, 1, 2, 3]), versions.of([7, 1, 9])
    ({'min_global_steps': 4, 'max_global_steps': 5}, {'min_global_steps': 4, 'max_global_steps': 4})
    """

    def __init__(self):
        self.parts: dict[int, set[Part]] = defaultdict(set)  # number of tokens before a part -> parts
        self.seen: set[int] = set()

    def add(self, prompt_ids: Sequence[int], generation: Generation) -> None:
        """Store the parts of a request's generation, which continues `prompt_ids`."""
        tokens, start = list(prompt_ids), 0
        for n_tokens, version in generation.versions:
            part = generation.token_ids[start : start + n_tokens]
            self.parts[len(tokens)].add(Part(hash(tuple(tokens)), tuple(part), version))
            self.seen.add(version)
            tokens += part
            start += n_tokens

    def of(self, tokens: Sequence[int], mask: Sequence[int] | None = None) -> dict[str, int]:
        """Return the oldest and the newest version that made a token of this trajectory; empty if versions are unknown.

        Of several requests that continue the same tokens, those count that share the most further tokens with it. If
        none shares a token, as when the policy chose among a request's most likely tokens, all of them count. `tokens`
        are prompt and response; `mask` is 0 for response tokens that the policy did not choose, such as a tool's.
        """
        versions = self.seen if len(self.seen) < 2 else self._trajectory_versions(tokens, mask) or self.seen
        return {OLDEST: min(versions), NEWEST: max(versions)} if versions else {}

    def _trajectory_versions(self, tokens: Sequence[int], mask: Sequence[int] | None) -> set[int]:
        versions: set[int] = set()
        chosen = [1] * len(tokens) if mask is None else [0] * (len(tokens) - len(mask)) + list(mask)
        explained = 0  # all tokens before this index are matched to a part or the prompt
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
        """Return the number of versions of the weights that have grown the tree, as a metric; empty if unknown."""
        return {"weight_versions": float(len(self.seen))} if self.seen else {}
