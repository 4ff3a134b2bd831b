"""Grows the trajectories of one prompt: one coroutine for any tree policy on any engine in any environment.

    policy ──Ask──> TreeBuilder ──> engine            a continuation, cut where it calls the environment
    policy ──Path─> TreeBuilder ──> environment       what it answers, as a segment
    policy ─────────────────> TrajectoryTree     segments, leaves, metrics

A policy is logic on a tree. It may wait for a set of its requests, as LATR does for its steps and HATO for its rounds,
or react to single ones, as ARPO does. Seeds are the policy's: they follow from the prompt's seed and from what is asked
for, never from which request was faster. So the same seeds give the same tree.

    >>> from verl.workers.rollout.tree_builder import grow
    >>> from verl.workers.rollout.trees.plain import Policy
    >>> tree = await grow(engine, prompt_ids, 8, Policy(), max_tokens=512, stop_token_ids=[eos], seed=1)
    >>> tree.trajectories()
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from verl.utils.parts import Tree, part
from verl.workers.rollout.engines.interface import Generation, RolloutEngine
from verl.workers.rollout.environment import NO_ENVIRONMENT, Environment
from verl.workers.rollout.trajectory_tree import TOOL, Segment, TrajectoryTree


@dataclass(frozen=True)
class Sampling:
    """Ordinary sampling of a prompt's tokens."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1


@dataclass(frozen=True)
class Path:
    """Where a trajectory stands.

    Args:
        tokens: its response so far, the environment's results included.
        turn: how many of them there were when the environment spoke last; the model's turn begins there.
        calls: how often it has called the environment.
    """

    tokens: tuple[int, ...] = ()
    turn: int = 0
    calls: int = 0

    @classmethod
    def of(cls, segments: Iterable[Segment]) -> "Path":
        """The path of a trajectory's segments, from the first on."""
        path = cls()
        for segment in segments:
            path = path.then(segment)
        return path

    def then(self, segment: Segment) -> "Path":
        """The path with one segment more; a tool's begins a new turn."""
        tokens = (*self.tokens, *segment.token_ids)
        if segment.author == TOOL:
            return replace(self, tokens=tokens, turn=len(tokens), calls=self.calls + 1)
        return replace(self, tokens=tokens)


@dataclass(frozen=True)
class Ask:
    """A continuation that a policy wants.

    Args:
        path: after which tokens.
        seed: of the sampling; None for greedy.
        max_tokens: at most so many; None: as many as the response may still have.
        stop: texts that end it, beside the environment's.
        greedy: the most likely tokens instead of sampled ones.
        temperature: another one than the prompt's.
        n_top_logprobs, n_entropy: as an engine's.
    """

    path: Path
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    greedy: bool = False
    temperature: float | None = None
    n_top_logprobs: int = 0
    n_entropy: int = 0


def derived_seed(*names: Any) -> int:
    """A seed of 31 bits that follows from these names alone."""
    return random.Random(" ".join(map(str, names))).getrandbits(31)


class TreeBuilder:
    """One prompt's tree while it grows, and what a policy may do with it.

    Args:
        engine: where tokens come from.
        prompt_ids: the prompt.
        environment: what answers the model.
        sampling: of ordinary tokens.
        max_tokens: of a response, the environment's results included.
        stop_token_ids: end a response.
        vocab_size: |V|, the unit of entropies.
        seed: of the prompt.
        request_id: of all requests to the engine.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        prompt_ids: Sequence[int],
        *,
        max_tokens: int,
        stop_token_ids: Sequence[int],
        environment: Environment = NO_ENVIRONMENT,
        sampling: Sampling = Sampling(),
        vocab_size: int = 0,
        seed: int = 0,
        request_id: str | None = None,
    ):
        self.engine, self.environment, self.sampling = engine, environment, sampling
        self.max_tokens, self.stop_token_ids = max_tokens, sorted(set(stop_token_ids))
        self.vocab_size, self.seed, self.request_id = vocab_size, seed, request_id
        self.tree = TrajectoryTree(list(prompt_ids))
        self.requested_tokens = 0
        self.calls: list[dict] = []  # the environment's, each with the info of its segment

    def tokens_left(self, path: Path) -> int:
        return self.max_tokens - len(path.tokens)

    async def ask(self, ask: Ask) -> Generation:
        """The continuation, up to the token that closes a call to the environment, if there is one.

        Raises:
            RuntimeError: the engine returned no token.
        """
        left, turn = self.tokens_left(ask.path), ask.path.tokens[ask.path.turn :]
        sampling = Sampling(temperature=0) if ask.greedy else self.sampling
        generation = await self.engine.generate(
            [*self.tree.prompt_ids, *ask.path.tokens],
            max_tokens=left if ask.max_tokens is None else min(left, ask.max_tokens),
            stop_token_ids=self.stop_token_ids,
            stop=[*ask.stop, *self.environment.stops(turn)],
            temperature=sampling.temperature if ask.temperature is None else ask.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=ask.seed,
            n_top_logprobs=ask.n_top_logprobs,
            n_entropy=ask.n_entropy,
            request_id=self.request_id,
        )
        if not generation.token_ids:
            raise RuntimeError(f"the engine returned no token after {len(ask.path.tokens)} of a response, {left} left")
        self.requested_tokens += len(generation.token_ids)
        if call := self.environment.first_call([*turn, *generation.token_ids]):
            return generation.first(call[0] - len(turn))
        return generation

    async def reply(self, path: Path, info: dict | None = None) -> Segment | str:
        """What the environment answers to the turn that `path` ends with.

        Returns:
            its answer as a segment, with `info`; or why the trajectory has ended: `stop` (an end token), `length` (no
            tokens are left), `call_limit`.
        """
        turn = path.tokens[path.turn :]
        call = self.environment.first_call(turn)
        if call is None:
            return "stop" if turn and turn[-1] in self.stop_token_ids else "length"
        if path.calls >= self.environment.call_limit:
            return "call_limit"
        tokens, about = await self.environment.answer(turn, call[1], self.tokens_left(path) - 1)
        self.calls.append(about)
        if not tokens:
            return "length"
        return Segment(None, tokens, author=TOOL, info=(info or {}) | about)

    def waits_for_reply(self, path: Path) -> bool:
        """Whether a path ends with a call to the environment."""
        return self.environment.first_call(path.tokens[path.turn :]) is not None

    def has_ended(self, path: Path) -> bool:
        """Whether the response can have no more tokens of the model: an end token, or none left."""
        ended = len(path.tokens) > path.turn and path.tokens[-1] in self.stop_token_ids
        return ended or self.tokens_left(path) < 1

    async def finish(
        self, path: Path, seed: int, temperature: float | None = None, n_entropy: int = 0
    ) -> list[Segment]:
        """Ordinary sampling from `path` to the end of the trajectory, turn by turn; the segments are not yet placed.

        Args:
            seed: of the first turn; those of later turns follow from it.
            n_entropy: if not 0, the model's segments have `entropies` in their `info`, one for each token.
        """
        segments: list[Segment] = []
        ask = Ask(path, seed, temperature=temperature, n_entropy=n_entropy)
        path = await self._finish_turn(ask, segments)
        while not isinstance(reply := await self.reply(path), str):
            segments.append(reply)
            path = path.then(reply)
            path = await self._finish_turn(replace(ask, path=path, seed=derived_seed(seed, path.calls)), segments)
        return segments

    async def _finish_turn(self, ask: Ask, segments: list[Segment]) -> Path:
        # a text that would have closed a tag begun before may end a request without closing it
        while not self.has_ended(ask.path) and not self.waits_for_reply(ask.path):
            generation = await self.ask(ask)
            info = {"entropies": generation.entropies} if ask.n_entropy else {}
            segments.append(Segment(None, generation.token_ids, generation.log_probs, info=info))
            ask = replace(ask, path=ask.path.then(segments[-1]), seed=derived_seed(ask.seed, "goes on"))
        return ask.path


# scores a response: (its tokens, fields that replace some of the prompt's extra_info) -> reward
Score = Callable[[Sequence[int], dict], Awaitable[float]]


class BranchPolicy(ABC):
    """Which tokens of a prompt's tree are generated. One instance for all prompts of a worker, which keeps no state of
    a prompt: `grow` has that.

    `register_tree` (verl.utils.parts) makes it a choice of `tree`.
    """

    part: Tree  # its registration

    # names of further fields of the rows -> (key of a segment's info, value of a token without it); see `row_fields`
    fields: dict[str, tuple[str, float | int]] = {}

    @classmethod
    @abstractmethod
    def from_config(cls, config, tokenizer=None) -> "BranchPolicy":
        """The policy of a run.

        Args:
            config: of the whole run.
            tokenizer: None where the config is only checked, before any process starts.

        Raises:
            ValueError: what is wrong with the policy's own keys; names the key.
        """

    def of_prompt(self, prompt: dict[str, Any], score: Score | None) -> "BranchPolicy":
        """The policy for one prompt, which the trainer may have sent settings with: it takes them out of `prompt`.

        Args:
            prompt: the row of the data set with `global_steps` and what components attached.
            score: the reward loop; None where rewards are not computed during the rollout.
        """
        return self

    @abstractmethod
    async def grow(self, builder: TreeBuilder, n: int) -> None:
        """Fill `builder.tree`: segments, `leaves` (1 to n, in the order of the rows) and `metrics`."""

    def about_tree(self, tree: TrajectoryTree) -> dict[str, Any]:
        """What the trainer must know of a finished tree beside its rows; goes into the first row's extra fields."""
        return {}


def policy_class(name: str) -> type[BranchPolicy]:
    """Return the policy of `actor_rollout_ref.rollout.tree=name`.

    Raises:
        ValueError: nobody has registered a tree of this name.
    """
    return part("tree", name, "actor_rollout_ref.rollout.tree").policy


async def grow(engine: RolloutEngine, prompt_ids: Sequence[int], n: int, policy: BranchPolicy, **options):
    """The tree of one prompt.

    Args:
        engine, prompt_ids: see `TreeBuilder`, which also takes the `options`.
        n: trajectories that the policy may return at most.

    Returns:
        the tree, numbered in the order of its trajectories; the same for the same seed and engine.

    Raises:
        ValueError: no prompt, or n < 1.
    """
    if n < 1 or not len(prompt_ids):
        raise ValueError(f"n={n}, a prompt of {len(prompt_ids)} tokens: expected at least 1 each")
    builder = TreeBuilder(engine, prompt_ids, **options)
    await policy.grow(builder, n)
    tree = builder.tree.renumbered()
    tree.metrics |= builder.environment.metrics(builder.calls)
    return tree
