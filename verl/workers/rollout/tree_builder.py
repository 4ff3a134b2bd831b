"""Grows the trajectories of one prompt: one coroutine for any tree policy on any engine in any environment.

    policy ── generate(path, …) ──> TreeBuilder ── GenerationRequest ──> engine     tokens, cut where they call a tool
    policy ── settle(path) ───────> TreeBuilder ── answer(state, …) ──> environment  its answer, or why the path ended
    policy ── add, insert ────────> TrajectoryTree                                   segments, leaves, metrics

A policy is logic on a tree. It may wait for a set of its requests, such as those of a round, or react to single ones.
The policy derives each request's seed from the prompt's seed and the request itself, never from the order in which
requests end. So the same seeds give the same tree.

    >>> from verl.workers.rollout.tree_builder import grow
    >>> from recipe.common.tree import Policy
    >>> tree = await grow(engine, prompt_ids, 8, Policy(), max_tokens=512, stop_token_ids=[eos], seed=1)
    >>> tree.trajectories()
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any

from verl.utils.parts import Tree
from verl.utils.token_fields import TokenField
from verl.workers.rollout.contexts import ContextRule
from verl.workers.rollout.engines.interface import Generation, GenerationRequest, RolloutEngine
from verl.workers.rollout.environment import NO_ENVIRONMENT, BranchLost, Ends, Environment, TurnEnd
from verl.workers.rollout.prompt_task import PromptTask
from verl.workers.rollout.trajectory_tree import TOOL, Path, Segment, SegmentInfo, TrajectoryTree, path_to


@dataclass(frozen=True)
class Sampling:
    """Parameters of ordinary sampling."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1


class Ended(str, Enum):
    """Reasons why a trajectory has ended: it is complete (an end token, or the environment is done), no tokens are
    left, its turn would get an answer beyond the limit, or the environment has lost its state."""

    STOP = "stop"
    LENGTH = "length"
    CALL_LIMIT = "call_limit"
    LOST = "lost"


@dataclass(frozen=True)
class Continuation:
    """The continuation of a path."""

    segments: list[Segment]  # the model's and the environment's, in order; their parents are not set
    path: Path  # after these segments
    ended: Ended | None = None  # why the trajectory has ended; None if the model may go on


def derived_seed(*names: Any) -> int:
    """Return a seed of 31 bits that depends only on these names."""
    return random.Random(" ".join(map(str, names))).getrandbits(31)


class TreeBuilder:
    """One prompt's tree while it grows, and the operations with which a policy grows it.

    Args:
        max_tokens: largest number of tokens of a response, including the environment's results.
        stop_token_ids: tokens with which the model ends a response, or its turn.
        environment: environment of this prompt (`Environment.open`).
        vocab_size: size |V| of the vocabulary; policies measure entropies in units of log |V|.
        max_model_len: largest number of tokens of a request and its continuation; None if `max_tokens` bounds it.
        score: function that calls the reward loop; None if rewards are not computed during the rollout.
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
        context_rule: ContextRule | None = None,
        max_model_len: int | None = None,
        score: "Score | None" = None,
    ):
        self.context_rule, self.max_model_len = context_rule, max_model_len
        self.engine, self.environment, self.sampling, self.score = engine, environment, sampling, score
        self.max_tokens, self._end_tokens = max_tokens, frozenset(stop_token_ids)
        self._stop_token_ids = sorted({*stop_token_ids, *environment.stop_token_ids})
        self.vocab_size, self.seed, self.request_id = vocab_size, seed, request_id
        self.tree = TrajectoryTree(list(prompt_ids))
        self.calls: list[dict[str, Any]] = []  # the environment's description of each call
        self.turn_rewards: dict[_End, float | None] = {}
        self.lost: dict[_End, str] = {}  # end of a trajectory that the environment has lost -> reason
        self._end_of = lru_cache(maxsize=1024)(self._find_end)

    def _find_end(self, turn: Sequence[int], state: Any = None) -> TurnEnd:
        return self.environment.at(state).ends(turn, self._end_tokens)

    def tokens_left(self, path: Path) -> int:
        """Return the number of tokens that the model may still write after `path`."""
        left = self.max_tokens - len(path.tokens)
        if self.max_model_len is None:
            return left
        return min(left, self.max_model_len - len(path.request(self.tree.prompt_ids)))

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
        """Return a continuation of `path`, at most up to the end of the model's turn. `max_tokens` lowers the limit
        `tokens_left`, and `stop` adds texts to the environment's. The temperature is by default the prompt's. The other
        arguments are those of `GenerationRequest`."""
        left, turn = self.tokens_left(path), path.tokens[path.turn :]
        environment = self.environment.at(path.state)
        if environment.max_turn_tokens is not None:
            left = min(left, environment.max_turn_tokens - len(turn))
        sampling = Sampling(temperature=0) if greedy else self.sampling
        request = GenerationRequest(
            path.request(self.tree.prompt_ids),
            max_tokens=left if max_tokens is None else min(left, max_tokens),
            stop_token_ids=self._stop_token_ids,
            stop=[*stop, *environment.stops(turn)],
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
        return generation.first(self._end_of((*turn, *generation.token_ids), path.state).n_tokens - len(turn))

    async def settle(self, path: Path, notes: Mapping[str, Any] | None = None) -> Continuation:
        """Return the environment's answer if the model's turn has ended, or why the trajectory has ended; else the
        continuation is empty, and the model continues its turn. The viewer shows `notes` with the answer."""
        then = await self._settled(path, notes)
        if then.ended in (Ended.LENGTH, Ended.CALL_LIMIT):
            self.environment.release(then.path.state)
        return then

    async def _settled(self, path: Path, notes: Mapping[str, Any] | None) -> Continuation:
        turn, ends = path.tokens[path.turn :], self.ends(path)
        if ends is Ends.TRAJECTORY:
            return Continuation([], path, Ended.STOP)
        if ends is Ends.NO:
            return Continuation([], path, Ended.LENGTH if self.tokens_left(path) < 1 else None)
        if path.calls >= self.environment.call_limit:
            is_final = await self.environment.is_final(turn)
            return Continuation([], path, Ended.STOP if is_final else Ended.CALL_LIMIT)
        try:
            changes = self.context_rule is not None or self.environment.changes_contexts
            left = self.max_tokens - len(path.tokens) if changes else self.tokens_left(path)
            answer = await self.environment.answer(path.state, turn, left - 1)
        except BranchLost as error:
            last = self._last(object())
            self.lost[_end(path.tokens, *last)] = str(error)
            return Continuation(last, path, Ended.LOST)
        self.calls += answer.calls
        last = self._last(answer.state, answer.calls) if answer.done else []
        self.turn_rewards[_end(path.tokens, *last)] = answer.reward
        if answer.done or not answer.tokens:
            self.environment.release(answer.state)
            return Continuation(last, path, Ended.STOP if answer.done else Ended.LENGTH)
        info = SegmentInfo(answer.calls, answer.state, notes=dict(notes or {}), context=answer.context)
        segment = Segment(None, answer.tokens, author=TOOL, info=info)
        then = path.then(segment)
        if self.context_rule is not None and answer.context is None:
            context = self.context_rule.after(self.tree.prompt_ids, then.tokens, then.answers)
            if context != then.request(self.tree.prompt_ids):
                info.context = context
                then = path.then(segment)
        if changes and self.tokens_left(then) < 1:
            self.environment.release(answer.state)
            return Continuation([], path, Ended.LENGTH)
        return Continuation([segment], then)

    def _last(self, state: Any, calls: tuple[dict[str, Any], ...] = ()) -> list[Segment]:
        """Return an empty answer at the end of a trajectory that is not the same as another with equal tokens."""
        info = SegmentInfo(calls, state)
        return [Segment(None, [], author=TOOL, info=info)] if self.environment.ends_differ else []

    async def advance(self, path: Path, **options: Any) -> Continuation:
        """Generate after `path`, let the environment answer if the turn has ended, and return both as a continuation.
        The options are those of `generate`. With `n_entropy` the model's segment holds entropies."""
        generation = await self.generate(path, **options)
        entropies = generation.entropies if options.get("n_entropy") else None
        segment = Segment(None, generation.token_ids, generation.log_probs, info=SegmentInfo(entropies=entropies))
        then = await self.settle(path.then(segment))
        return Continuation([segment, *then.segments], then.path, then.ended)

    def ends(self, path: Path) -> Ends:
        """Return what ends with the last token of a path: nothing, the model's turn, or the trajectory."""
        return self._end_of(path.tokens[path.turn :], path.state).ends

    def is_end(self, token: int) -> bool:
        """Return whether generation ends at this token wherever it occurs, so that nothing else can stand there."""
        return token in self._stop_token_ids

    async def reward(self, leaf: int) -> float:
        """Return the reward of a trajectory that ends with a segment: the environment's, or else that of `score`."""
        if self.environment.counted_rewards([]) is not None:
            return sum(_rewards_on_path(self, self.tree, leaf).values())
        assert self.score is not None, "the checks refuse a tree that reads rewards without these"
        return await self.score(path_to(self.tree, leaf).tokens, {})

    @property
    def final_tokens(self) -> list[int]:
        """Return the tokens that end the trajectory wherever they occur."""
        return [token for token in self._stop_token_ids if self._end_of((token,)).ends is Ends.TRAJECTORY]

    async def finish(self, path: Path, seed: int, **options: Any) -> list[Segment]:
        """Return the segments of `continue_to_end`."""
        return (await self.continue_to_end(path, seed, **options)).segments

    async def continue_to_end(
        self, path: Path, seed: int, temperature: float | None = None, n_entropy: int = 0
    ) -> Continuation:
        """Sample from `path` to the end of the trajectory, turn by turn (see `advance`). The seeds of later turns are
        derived from `seed`. The segments are not added to the tree."""
        segments: list[Segment] = []
        request_seed, then = seed, await self.settle(path)
        while True:
            segments += then.segments
            if then.ended is not None:
                return Continuation(segments, then.path, then.ended)
            if then.path.calls > path.calls:
                request_seed = derived_seed(seed, then.path.calls)
            elif then.segments:
                # A request may end at text that looks like the rest of a closing tag but closes no call.
                request_seed = derived_seed(request_seed, "goes on")
            path = then.path
            then = await self.advance(path, seed=request_seed, temperature=temperature, n_entropy=n_entropy)


# (token ids of a response, fields that replace some of the prompt's extra_info) -> reward
Score = Callable[[Sequence[int], dict], Awaitable[float]]


def token_text(tokenizer, **options: Any) -> Callable[[int], str]:
    """Return a function that returns a token's text and keeps it; the options are those of the tokenizer's `decode`."""
    return lru_cache(maxsize=None)(lambda token: tokenizer.decode([token], **options))


class BranchPolicy(ABC):
    """Base class of tree policies, which decide what tokens of a prompt's tree are generated. One instance serves all
    prompts of a worker; only `grow` holds the state of a prompt. `register_tree` (verl.utils.parts) makes a policy a
    choice of `tree`."""

    part: Tree  # registration of the policy

    # token fields that the policy writes to `SegmentInfo.fields`; the rows get them in addition to segment ids
    fields: tuple[TokenField, ...] = ()

    def __init__(self, keys: Any = None, text_of: Callable[[int], str] = str):
        """`keys` are the policy's settings, and `text_of` returns a token's text."""
        self.keys, self.text_of = keys, text_of

    @classmethod
    def from_config(cls, config, tokenizer=None) -> "BranchPolicy":
        """Return the policy of a run with this config; raise a ValueError that names a wrong key of the policy. The
        tokenizer is None if the config is only checked, before any process starts."""
        return cls(cls.part.read(config), token_text(tokenizer))

    def for_task(self, task: PromptTask) -> "BranchPolicy":
        """Return the policy for one prompt, with the trainer's settings for it."""
        return self

    @abstractmethod
    async def grow(self, builder: TreeBuilder, n: int) -> None:
        """Fill `builder.tree`: its segments, `leaves` (1 to n, in the order of the rows) and `metrics`."""

    def data_for_trainer(self, tree: TrajectoryTree) -> Any:
        """Return a record of a finished tree for components (`BatchRows.tree_data`); None if they need nothing."""
        return None


async def grow(engine: RolloutEngine, prompt_ids: Sequence[int], n: int, policy: BranchPolicy, **options):
    """Grow and return the tree of one prompt with 1 to n trajectories; segments are numbered in trajectory order. The
    same seed and engine give the same tree. The options are arguments of `TreeBuilder`."""
    if n < 1 or not len(prompt_ids):
        raise ValueError(f"n={n}, a prompt of {len(prompt_ids)} tokens: expected at least 1 each")
    builder = TreeBuilder(engine, prompt_ids, **options)
    await policy.grow(builder, n)
    tree = builder.tree
    if builder.lost:
        rows = zip(tree.leaves, tree.trajectories(), strict=True)
        tree.leaves = [leaf for leaf, tokens in rows if _end(tokens, tree.segments[leaf]) not in builder.lost]
        if not tree.leaves:
            raise BranchLost(f"the environment lost every trajectory: {next(iter(builder.lost.values()))}")
    tree = tree.renumbered()
    if builder.environment.counted_rewards([]) is not None:
        tree.turn_rewards = [_rewards_on_path(builder, tree, leaf) for leaf in tree.leaves]
    tree.metrics |= builder.environment.metrics(builder.calls)
    return tree


def _rewards_on_path(builder: TreeBuilder, tree: TrajectoryTree, leaf: int) -> dict[int, float]:
    """Return the environment's rewards of a trajectory's turns, by the number of tokens up to the end of the turn."""
    segments, ends = [tree.segments[i] for i in tree.path(leaf)], []
    tokens: tuple[int, ...] = ()
    for segment, following in zip(segments, [*segments[1:], None], strict=True):
        tokens = (*tokens, *segment.token_ids)
        end = _end(tokens, following)
        if (following is None or following.author == TOOL) and segment.token_ids and end in builder.turn_rewards:
            ends.append(end)
    counted = builder.environment.counted_rewards([builder.turn_rewards[end] for end in ends])
    return dict(zip((len(tokens) for tokens, _ in ends), counted or [], strict=True))


# the tokens up to a turn's end, and the state after it if it ends a trajectory with a state of its own
_End = tuple[tuple[int, ...], Any]


def _end(tokens: Sequence[int], following: Segment | None = None) -> _End:
    """Return the end of a turn, given the segment that follows it or, if that is empty, ends the trajectory."""
    is_last = following is not None and following.author == TOOL and not following.token_ids
    return tuple(tokens), following.info.state if is_last else None
