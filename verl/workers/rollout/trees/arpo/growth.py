"""The trajectories of one prompt that call tools and fork after their results (ARPO, AEPO).

    turn ──> first `entropy_tokens` tokens ──> their entropy: decide whether the state before this turn forks
         └─> to a closing tag, the end, or the last token ──> call the tool, append its result ──> next turn

Every trajectory is a coroutine of its own: no rounds, a slow tool holds back itself only. Which branches the budget
grants does not depend on who is fast (budget.py); coins and sampling seeds follow from the prompt's seed and the
trajectory's key, (2,) for the third from the prompt, (2, 1, 0) for the first branch after its first tool call.
"""

import asyncio
import math
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from verl.workers.rollout.entropy import mean_entropy
from verl.workers.rollout.rollout_engine import RolloutEngine
from verl.workers.rollout.tools.protocol import Protocol
from verl.workers.rollout.tools.tool_box import ToolBox, ToolCall
from verl.workers.rollout.trajectory_tree import TOOL, Segment, TrajectoryTree
from verl.workers.rollout.trees.arpo.branching import BRANCH_POLICIES, dynamic_initial_rollouts
from verl.workers.rollout.trees.arpo.budget import BranchBudget, Key
from verl.workers.rollout.trees.arpo.config import ToolTreeConfig


@dataclass(frozen=True)
class Trajectory:
    """A state between two turns.

    Args:
        key: who it is.
        leaf: its last segment.
        response: its tokens so far.
        calls: tool calls made, those before a fork included.
        decided: calls at which it last decided about a fork; a branch does not decide again where it left.
        consecutive: forks in a row on its path.
        base: entropy after the prompt; None before it is known.
        may_fork: not where it fills up the group.
    """

    key: Key
    leaf: int | None = None
    response: tuple[int, ...] = ()
    calls: int = 0
    decided: int = 0
    consecutive: int = 0
    base: float | None = None
    may_fork: bool = True


class ToolTree:
    """Grows the tree of one prompt; `run` once.

    Args:
        engine, tools, protocol: where tokens, results and tags come from.
        prompt_ids: the prompt.
        n: trajectories to return.
        config: how they branch.
        room: tokens that a response may have, results included.
        stop_token_ids: end a trajectory.
        sampling: temperature, top_p, top_k.
        seed: of the prompt.
        request_id: of the engine's sticky routing.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        tools: ToolBox,
        protocol: Protocol,
        prompt_ids: Sequence[int],
        n: int,
        config: ToolTreeConfig,
        *,
        room: int,
        stop_token_ids: Sequence[int],
        sampling: dict[str, float],
        seed: int,
        request_id: str | None = None,
    ):
        self.engine, self.tools, self.protocol, self.n, self.config = engine, tools, protocol, n, config
        self.room, self.seed, self.stop_token_ids = room, seed, set(stop_token_ids)
        self.options = {**sampling, "stop_token_ids": list(stop_token_ids), "request_id": request_id}
        self.vocab_size = len(protocol.tokenizer)
        self.tree = TrajectoryTree(list(prompt_ids))
        self.ended: dict[Key, tuple[Trajectory, str]] = {}
        self.calls: list[ToolCall] = []
        self.counts: Counter[str] = Counter()
        self.seen: defaultdict[str, list[float]] = defaultdict(list)
        self.budget: BranchBudget | None = None
        self.held: list[tuple[Trajectory, float]] = []  # the probe's states and entropies, decided once it has ended
        self.waiting: dict[Key, Trajectory] = {}  # states that branches will start from, by the branch's key
        self.tasks: set[asyncio.Task] = set()

    async def run(self) -> TrajectoryTree:
        """Exactly n trajectories. An engine's failure is the group's; a tool's is told to the model."""
        try:
            branches = self.config.branch_policy != "never"
            first, initial = 0, min(self.config.initial_rollouts, self.n) if branches else self.n
            if self.config.enable_dynamic_rollouts:
                first, initial = 1, await self._probe()
            else:
                self._open_budget(initial)
            for i in range(first, initial):
                self._start(Trajectory((i,)))
            self._grow_on()
            while self.tasks:
                done, _ = await asyncio.wait(self.tasks, return_when=asyncio.FIRST_COMPLETED)
                self.tasks -= done  # others may have started meanwhile
                for task in done:
                    task.result()
        except BaseException:
            for task in self.tasks:
                task.cancel()
            await asyncio.gather(*self.tasks, return_exceptions=True)
            raise
        self.tree.leaves = [self.ended[key][0].leaf for key in sorted(self.ended)]
        tree = self.tree.sorted_by(lambda segment: segment.info["key"])
        tree.metrics = self._metrics()
        return tree

    # -- the budget --

    def _open_budget(self, initial: int) -> None:
        self.initial = initial
        self.budget = BranchBudget(self.n - initial, self.config.beam_size, self.config.call_limit)
        for i in range(initial):
            self.budget.enter((i,), 0)

    async def _probe(self) -> int:
        """AEPO: the first trajectory alone tells how many start from the prompt; its forks are decided afterwards."""
        self._start(Trajectory((0,)))
        await next(iter(self.tasks))
        self.tasks.clear()
        h_root = self.seen["entropy_after_prompt"][0]
        h_tool = fmean(self.seen.get("entropy_after_tool", [0.0]))  # no call, nothing to be unsure about
        nats = math.log(self.vocab_size)
        initial = dynamic_initial_rollouts(self.n, h_root * nats, h_tool * nats, self.config.dynamic_rollouts_beta)
        self._open_budget(initial)
        consecutive = 0
        for state, entropy in self.held:
            consecutive = self._decide(replace(state, consecutive=consecutive), entropy)
        self.budget.leave((0,))
        return initial

    def _decide(self, at: Trajectory, entropy: float) -> int:
        """Whether a state forks; returns the forks in a row on its path."""
        probability = BRANCH_POLICIES[self.config.branch_policy](entropy, at.base, at.consecutive, self.config)
        self.seen["branch_probability"].append(probability)
        forks = random.Random(f"{self.seed} coin {at.key} {at.calls}").random() < probability
        consecutive = at.consecutive + 1 if forks else 0
        if forks:
            for branch in range(self.config.beam_size - 1):
                key = (*at.key, at.calls, branch)
                self.waiting[key] = replace(at, key=key, decided=at.calls, consecutive=consecutive)
        self.budget.decide(at.key, at.calls, forks)
        return consecutive

    def _grow_on(self) -> None:
        """Start what the budget grants: branches first, then trajectories from the prompt that fill it up."""
        for key in self.budget.grant():
            self.counts["forks"] += 1
            self._start(self.waiting.pop(key))
        for _ in range(self.budget.spare()):
            self.budget.take(1)
            self._start(Trajectory((self.initial + self.counts["filled"],), may_fork=False))
            self.counts["filled"] += 1

    def _start(self, trajectory: Trajectory) -> None:
        self.tasks.add(asyncio.create_task(self._run_trajectory(trajectory)))

    # -- one trajectory --

    async def _run_trajectory(self, at: Trajectory) -> None:
        while True:
            at, tokens = await self._turn(at)
            call, why = self.protocol.first_call(tokens), None
            if call is None:
                why = "stop" if tokens[-1] in self.stop_token_ids else "length"
            elif at.calls >= self.config.call_limit:
                why = "call_limit"
            elif (after := await self._call(at, tokens, call[1])) is None:
                why = "length"
            if why:
                break
            at = after
        self.ended[at.key] = at, why
        if self.budget is not None and at.may_fork:
            self.budget.leave(at.key)
            self._grow_on()

    async def _turn(self, at: Trajectory) -> tuple[Trajectory, list[int]]:
        """What the model writes up to a tool's closing tag, its end, or the end of the room."""
        tokens, log_probs, part = [], [], 0
        state, room = at, self.room - len(at.response)
        looks = self.config.branch_policy != "never" and at.may_fork and (at.base is None or at.calls > at.decided)
        while True:
            limit = min(self.config.entropy_tokens, room) if looks and part == 0 else room - len(tokens)
            generation = await self.engine.generate(
                [*self.tree.prompt_ids, *at.response, *tokens],
                max_tokens=limit,
                stop=self.protocol.stops(tokens),
                n_entropy=self.config.entropy_top_k if looks and part == 0 else 0,
                seed=random.Random(f"{self.seed} tokens {at.key} {at.calls} {part}").getrandbits(31),
                **self.options,
            )
            if not generation.token_ids:
                raise RuntimeError(f"the engine returned no token, asked for at most {limit}")
            tokens, log_probs = [*tokens, *generation.token_ids], [*log_probs, *generation.log_probs]
            call = self.protocol.first_call(tokens)
            if call:
                tokens, log_probs = tokens[: call[0]], log_probs[: call[0]]
            if looks and part == 0:
                at = self._look(state, mean_entropy(generation.entropies[: len(tokens)], self.vocab_size))
            if call or generation.stopped or len(tokens) >= room:
                break
            part += 1
        leaf = self.tree.add(Segment(at.leaf, tokens, log_probs, info={"key": list(at.key)}))
        return replace(at, leaf=leaf, response=(*at.response, *tokens)), tokens

    def _look(self, at: Trajectory, entropy: float) -> Trajectory:
        """The state before a turn, after the first tokens of the turn have been seen."""
        if at.base is None:
            self.seen["entropy_after_prompt"].append(entropy)
            return replace(at, base=entropy)
        self.seen["entropy_after_tool"].append(entropy)
        if self.budget is None:
            self.held.append((at, entropy))
            return replace(at, decided=at.calls)
        consecutive = self._decide(at, entropy)
        self._grow_on()
        return replace(at, decided=at.calls, consecutive=consecutive)

    async def _call(self, at: Trajectory, tokens: list[int], tag: str) -> Trajectory | None:
        """The state after the tool's result; None where there is no room for it and one more token."""
        content = self.protocol.content(tokens, tag)
        if content is None:
            call = ToolCall(tag, f"Error: {tag} was closed but not opened", ok=False, seconds=0.0, error="malformed")
        else:
            call = await self.tools.call(tag, content)
        self.calls.append(call)
        most = min(self.config.max_result_tokens, self.room - len(at.response) - 1)
        result = self.protocol.result_ids(call.text, most)
        if not result:
            return None
        info = {"key": list(at.key), "tool": call.tool, "ok": call.ok, "seconds": round(call.seconds, 4)}
        info |= {name: getattr(call, name) for name in ("cached", "retries", "error") if getattr(call, name)}
        leaf = self.tree.add(Segment(at.leaf, result, author=TOOL, info=info))
        return replace(at, leaf=leaf, response=(*at.response, *result), calls=at.calls + 1)

    def _metrics(self) -> dict[str, float]:
        """Of the group; a shared call or token counts once, except in `tool_calls_per_trajectory`."""
        ended = [trajectory for trajectory, _ in self.ended.values()]
        made, held = sum(len(s.token_ids) for s in self.tree.segments), sum(len(t.response) for t in ended)
        metrics = {
            "initial_rollouts": self.initial,
            "forks": self.counts["forks"],
            "filled": self.counts["filled"],
            "shared_tokens": 1 - made / held,
            "distinct_trajectories": len({t.response for t in ended}),
            "tool_calls_per_trajectory": fmean(t.calls for t in ended),
            "ended_at_call_limit": fmean(why == "call_limit" for _, why in self.ended.values()),
            "ended_at_length": fmean(why == "length" for _, why in self.ended.values()),
        }
        metrics |= {name: fmean(values) for name, values in self.seen.items()}
        return {name: float(value) for name, value in (metrics | call_metrics(self.calls)).items()}


def call_metrics(calls: Sequence[ToolCall]) -> dict[str, float]:
    """Numbers of calls, failures, retries, cache hits, and mean seconds, in all and by tool."""
    metrics = {"tool_calls": len(calls), "tool_failures": sum(not call.ok for call in calls)}
    for tool in sorted({call.tool for call in calls}):
        own = [call for call in calls if call.tool == tool]
        metrics |= {
            f"tool_{tool}/calls": len(own),
            f"tool_{tool}/failures": sum(not call.ok for call in own),
            f"tool_{tool}/retries": sum(call.retries for call in own),
            f"tool_{tool}/cache_hits": sum(call.cached for call in own),
            f"tool_{tool}/seconds": fmean(call.seconds for call in own),
        }
    return metrics
