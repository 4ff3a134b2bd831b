"""Grows the trajectories of one prompt: one coroutine for any tree policy on any engine in any environment.

    policy ── generate(path, …) ──> TreeBuilder ── GenerationRequest ──> engine     tokens, cut where they call a tool
    policy ── settle(path) ───────> TreeBuilder ── answer ────────────> environment  its answer, or why it has ended
    policy ── add, insert ────────> TrajectoryTree                                   segments, leaves, metrics

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
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from typing import Any

from verl.utils.parts import Tree, parts
from verl.utils.token_fields import TokenField
from verl.workers.rollout.answer_likelihood import AnswerLikelihood
from verl.workers.rollout.engines.interface import Generation, GenerationRequest, RolloutEngine
from verl.workers.rollout.environment import NO_ENVIRONMENT, Environment
from verl.workers.rollout.prompt_task import PromptTask
from verl.workers.rollout.trajectory_tree import TOOL, Segment, SegmentInfo, TrajectoryTree


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


class Ended(str, Enum):
    """Why a trajectory has ended: with an end token, for lack of tokens, or with a call beyond the limit."""

    STOP = "stop"
    LENGTH = "length"
    CALL_LIMIT = "call_limit"


@dataclass(frozen=True)
class Continuation:
    """What follows a path.

    Args:
        segments: segments of the model and of the environment, in order; their parents are not set.
        path: the path behind them.
        ended: why the trajectory has ended; None if the model may go on.
    """

    segments: list[Segment]
    path: Path
    ended: Ended | None = None


def derived_seed(*names: Any) -> int:
    """A seed of 31 bits that follows from these names alone."""
    return random.Random(" ".join(map(str, names))).getrandbits(31)


class TreeBuilder:
    """One prompt's tree while it grows, and what a policy may do with it.

    Args:
        max_tokens: largest number of tokens of a response, the environment's results included.
        stop_token_ids: tokens that end a response.
        sampling: sampling of ordinary tokens.
        vocab_size: |V|, the unit of entropies.
        seed: seed of the prompt.
        request_id: name of all requests to the engine.
        answer_likelihood: how likely the reference answer is after a beginning; None in runs that do not need it.
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
        answer_likelihood: AnswerLikelihood | None = None,
    ):
        self.answer_likelihood = answer_likelihood
        self.engine, self.environment, self.sampling = engine, environment, sampling
        self.max_tokens, self.stop_token_ids = max_tokens, sorted(set(stop_token_ids))
        self.vocab_size, self.seed, self.request_id = vocab_size, seed, request_id
        self.tree = TrajectoryTree(list(prompt_ids))
        self.calls: list[dict[str, Any]] = []  # what the environment said of each call
        self._call_in = lru_cache(maxsize=1024)(environment.first_call)

    def tokens_left(self, path: Path) -> int:
        """Return how many tokens the response may still have after `path`."""
        return self.max_tokens - len(path.tokens)

    async def generate(
        self,
        path: Path,
        *,
        seed: int | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        greedy: bool = False,
        temperature: float | None = None,
        n_top_logprobs: int = 0,
        n_entropy: int = 0,
    ) -> Generation:
        """Return a continuation of `path`, up to the token that closes a call to the environment, if there is one.

        Args:
            max_tokens: largest number of tokens; None for as many as the response may still have.
            stop: texts that end the continuation, beside the environment's.
            greedy: take the most likely tokens instead of sampled ones.
            temperature: another temperature than the prompt's.
            n_top_logprobs, n_entropy: see `GenerationRequest`.

        Raises:
            RuntimeError: the engine returned no token.
        """
        left, turn = self.tokens_left(path), path.tokens[path.turn :]
        sampling = Sampling(temperature=0) if greedy else self.sampling
        request = GenerationRequest(
            [*self.tree.prompt_ids, *path.tokens],
            max_tokens=left if max_tokens is None else min(left, max_tokens),
            stop_token_ids=self.stop_token_ids,
            stop=[*stop, *self.environment.stops(turn)],
            temperature=sampling.temperature if temperature is None else temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=seed,
            n_top_logprobs=n_top_logprobs,
            n_entropy=n_entropy,
            request_id=self.request_id,
        )
        generation = await self.engine.generate(request)
        if not generation.token_ids:
            raise RuntimeError(f"the engine returned no token after {len(path.tokens)} of a response, {left} left")
        if call := self._call_in((*turn, *generation.token_ids)):
            return generation.first(call[0] - len(turn))
        return generation

    async def settle(self, path: Path, notes: Mapping[str, Any] | None = None) -> Continuation:
        """Return what follows the model's tokens at the end of `path`: the environment's answer to a call that they
        close, or why the trajectory has ended. With neither, the model goes on in the same turn. The viewer shows the
        notes with the answer."""
        turn = path.tokens[path.turn :]
        if (call := self._call_in(turn)) is None:
            if turn and turn[-1] in self.stop_token_ids:
                return Continuation([], path, Ended.STOP)
            return Continuation([], path, Ended.LENGTH if self.tokens_left(path) < 1 else None)
        if path.calls >= self.environment.call_limit:
            return Continuation([], path, Ended.CALL_LIMIT)
        tokens, about = await self.environment.answer(turn, call[1], self.tokens_left(path) - 1)
        self.calls.append(about)
        if not tokens:
            return Continuation([], path, Ended.LENGTH)
        answer = Segment(None, tokens, author=TOOL, info=SegmentInfo(call=about, notes=dict(notes or {})))
        return Continuation([answer], path.then(answer))

    async def advance(self, path: Path, **options: Any) -> Continuation:
        """Generate after `path`, perhaps let the environment answer, and say whether the trajectory has ended.

        The options are those of `generate`. With `n_entropy` the model's segment has entropies.
        """
        generation = await self.generate(path, **options)
        entropies = generation.entropies if options.get("n_entropy") else None
        segment = Segment(None, generation.token_ids, generation.log_probs, info=SegmentInfo(entropies=entropies))
        then = await self.settle(path.then(segment))
        return Continuation([segment, *then.segments], then.path, then.ended)

    def waits_for_reply(self, path: Path) -> bool:
        """Return whether a path ends with a call to the environment."""
        return self._call_in(path.tokens[path.turn :]) is not None

    def has_ended(self, path: Path) -> bool:
        """Return whether the model can write no more: the response has an end token, or no tokens are left."""
        ended = len(path.tokens) > path.turn and path.tokens[-1] in self.stop_token_ids
        return ended or self.tokens_left(path) < 1

    async def finish(
        self, path: Path, seed: int, temperature: float | None = None, n_entropy: int = 0
    ) -> list[Segment]:
        """Return the segments of ordinary sampling from `path` to the end of the trajectory, turn by turn. They are
        not yet in the tree.

        Args:
            seed: seed of the first turn; the seeds of later turns are derived from it.
            temperature: another temperature than the prompt's.
            n_entropy: if not 0, the model's segments have an entropy for each token.
        """
        segments: list[Segment] = []
        of_request, then = seed, await self.settle(path)
        while True:
            segments += then.segments
            if then.ended is not None:
                return segments
            if then.path.calls > path.calls:
                of_request = derived_seed(seed, then.path.calls)
            elif then.segments:
                # a text that would have closed a tag begun before may end a request without closing it
                of_request = derived_seed(of_request, "goes on")
            path = then.path
            then = await self.advance(path, seed=of_request, temperature=temperature, n_entropy=n_entropy)


# scores a response: (its tokens, fields that replace some of the prompt's extra_info) -> reward
Score = Callable[[Sequence[int], dict], Awaitable[float]]


class BranchPolicy(ABC):
    """Which tokens of a prompt's tree are generated. One instance for all prompts of a worker, which keeps no state of
    a prompt: `grow` has that.

    `register_tree` (verl.utils.parts) makes it a choice of `tree`.
    """

    part: Tree  # its registration

    # token fields that the rows have beside segment ids: those of `SegmentInfo.fields`
    fields: tuple[TokenField, ...] = ()

    @classmethod
    @abstractmethod
    def from_config(cls, config, tokenizer=None) -> "BranchPolicy":
        """Return the policy of a run with this config, or raise a ValueError that names the policy's wrong key.

        The tokenizer is None where the config is only checked, before any process starts.
        """

    def for_task(self, task: PromptTask, score: Score | None) -> "BranchPolicy":
        """Return the policy for one prompt, which follows the trainer's settings.

        `score` asks the reward loop; it is None where rewards are not computed during the rollout.
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
    policies = {known: tree.policy for known, tree in parts("tree").items() if not tree.variant}
    if name not in policies:
        raise ValueError(f"actor_rollout_ref.rollout.tree={name}: expected one of {', '.join(policies)}")
    return policies[name]


async def grow(engine: RolloutEngine, prompt_ids: Sequence[int], n: int, policy: BranchPolicy, **options):
    """Return the tree of one prompt with 1 to n trajectories, numbered in their order.

    It is the same for the same seed and engine. `TreeBuilder` takes the options.
    """
    if n < 1 or not len(prompt_ids):
        raise ValueError(f"n={n}, a prompt of {len(prompt_ids)} tokens: expected at least 1 each")
    builder = TreeBuilder(engine, prompt_ids, **options)
    await policy.grow(builder, n)
    tree = builder.tree.renumbered()
    tree.metrics |= builder.environment.metrics(builder.calls)
    return tree
