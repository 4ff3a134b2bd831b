"""ARPO and AEPO as a tree policy: trajectories fork where the model is uncertain after a tool's result.

    turn ──> first `entropy_tokens` tokens ──> their entropy: decide whether the state before this turn forks
         └─> to a closing tag, the end, or the last token ──> call the tool, append its result ──> next turn

Without tools a turn ends with `turn_delimiter` or after `max_turn_tokens` tokens, `turn_limit` times at most.

Every trajectory is a coroutine of its own, so a slow tool delays only its own trajectory. The branches that the budget
grants do not depend on speed (budget.py). Fork decisions and sampling seeds follow from the prompt's seed and the
trajectory's key: (2,) is the third one from the prompt, (2, 1, 0) its first branch after its first turn.
"""

import asyncio
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from recipe.arpo.branching import BRANCH_POLICIES, dynamic_initial_rollouts
from recipe.arpo.budget import BranchBudget, Key
from recipe.arpo.keys import ARPOConfig
from verl.utils.entropy_estimate import mean_entropy
from verl.utils.parts import register_tree
from verl.workers.config.keys import ROLLOUT, check_log_probs
from verl.workers.rollout.environment import NO_ENVIRONMENT, Ends
from verl.workers.rollout.tools.protocol import stops_after
from verl.workers.rollout.trajectory_tree import Segment, SegmentInfo
from verl.workers.rollout.tree_builder import BranchPolicy, Ended, Path, TreeBuilder, derived_seed


@register_tree(
    "aepo",
    "AEPO (arXiv 2510.14545): ARPO's forks, less likely where they follow one another, and a budget from a probe "
    "trajectory",
    extends="arpo",
    values={f"{ROLLOUT}.branch_policy": "entropy_balanced", f"{ROLLOUT}.enable_dynamic_rollouts": True},
)
@register_tree(
    "arpo",
    "ARPO (arXiv 2507.19849): trajectories that fork after a tool's result where the model has become unsure; without "
    "tools (environment=none) at the end of a paragraph",
    keys=ARPOConfig,
    section=ROLLOUT,
    smallest={"initial_rollouts": 3, "branch_probability": 1.0, "entropy_tokens": 4, "max_turn_tokens": 8},
    forks_at_results=True,
    rollout_modes=("sync_with_tool",),
)
class Policy(BranchPolicy):
    """The policy of `tree=arpo`; AEPO is another `branch_policy` with `enable_dynamic_rollouts`.

    Args:
        config: the keys.
        text_of: function that returns the text of tokens, in which `turn_delimiter` ends a turn without tools.
    """

    def __init__(self, config: ARPOConfig, text_of: Callable[[Sequence[int]], str]):
        self.config, self.text_of = config, text_of

    @classmethod
    def from_config(cls, config, tokenizer=None) -> "Policy":
        rollout = config.actor_rollout_ref.rollout
        arpo = cls.part.read(config)
        if arpo.branch_policy != "never":
            check_log_probs(rollout, f"{ROLLOUT}.entropy_top_k", arpo.entropy_top_k)
        return cls(arpo, tokenizer and tokenizer.decode)

    async def grow(self, builder: TreeBuilder, n: int) -> None:
        await ForkingTrajectories(builder, n, self.config, self.text_of).run()


@dataclass(frozen=True)
class Trajectory:
    """A trajectory's state between two turns.

    Args:
        key: identifier of the trajectory, see above.
        leaf: index of its last segment; None at the prompt.
        path: the trajectory's path so far.
        turns: number of finished turns, including those before a fork.
        decided_at_turn: the turn after which this trajectory last decided whether to fork. A new branch inherits it, so
            that it does not decide again at the same turn.
        consecutive: number of consecutive forks at the end of its path.
        base: mean entropy after the prompt; None before it has been measured.
        may_fork: whether it may fork; one that only fills up the group may not.
    """

    key: Key
    leaf: int | None = None
    path: Path = Path()
    turns: int = 0
    decided_at_turn: int = 0
    consecutive: int = 0
    base: float | None = None
    may_fork: bool = True


class ForkingTrajectories:
    """Grows the n trajectories of one prompt; call `run` once. A failure of the engine fails the whole group; a failure
    of a tool is reported to the model."""

    def __init__(self, builder: TreeBuilder, n: int, config: ARPOConfig, text_of: Callable[[Sequence[int]], str]):
        self.builder, self.n, self.config, self.text_of, self.tree = builder, n, config, text_of, builder.tree
        self.has_tools = builder.environment is not NO_ENVIRONMENT
        self.turn_limit = builder.environment.call_limit if self.has_tools else config.turn_limit
        self.ended: dict[Key, tuple[Trajectory, Ended]] = {}
        self.counts: Counter[str] = Counter()
        self.seen: defaultdict[str, list[float]] = defaultdict(list)
        self.budget: BranchBudget | None = None
        self.held: list[tuple[Trajectory, float]] = []  # the probe's states and entropies, decided after its end
        self.waiting: dict[Key, Trajectory] = {}  # key of a branch -> state from which it will start
        self.tasks: set[asyncio.Task] = set()

    async def run(self) -> None:
        """Grow exactly n trajectories, and write the tree's leaves and metrics."""
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
                self.tasks -= done  # the set is not replaced, as other tasks may have started meanwhile
                for task in done:
                    task.result()
        except BaseException:
            for task in self.tasks:
                task.cancel()
            await asyncio.gather(*self.tasks, return_exceptions=True)
            raise
        self.tree.leaves = [self.ended[key][0].leaf for key in sorted(self.ended)]
        self.tree.metrics = self._metrics()

    # -- the budget --

    def _open_budget(self, initial: int) -> None:
        self.initial = initial
        self.budget = BranchBudget(self.n - initial, self.config.beam_size, self.turn_limit)
        for i in range(initial):
            self.budget.enter((i,), 0)

    async def _probe(self) -> int:
        """Run the first trajectory alone, decide its forks, and return the number that start from the prompt (AEPO)."""
        self._start(Trajectory((0,)))
        await next(iter(self.tasks))
        self.tasks.clear()
        h_root = self.seen["entropy_after_prompt"][0]
        h_turn = fmean(self.seen.get(self._after_turn, [0.0]))  # 0 if no further turn follows
        nats = math.log(self.builder.vocab_size)
        initial = dynamic_initial_rollouts(self.n, h_root * nats, h_turn * nats, self.config.dynamic_rollouts_beta)
        self._open_budget(initial)
        consecutive = 0
        for state, entropy in self.held:
            consecutive = self._decide(replace(state, consecutive=consecutive), entropy)
        self.budget.leave((0,))
        return initial

    @property
    def _after_turn(self) -> str:
        return "entropy_after_tool" if self.has_tools else "entropy_after_turn"

    def _decide(self, at: Trajectory, entropy: float) -> int:
        """Decide whether a state forks, and return the number of consecutive forks on its path."""
        probability = BRANCH_POLICIES[self.config.branch_policy](entropy, at.base, at.consecutive, self.config)
        self.seen["branch_probability"].append(probability)
        forks = random.Random(f"{self.builder.seed} coin {at.key} {at.turns}").random() < probability
        consecutive = at.consecutive + 1 if forks else 0
        if forks:
            for branch in range(self.config.beam_size - 1):
                key = (*at.key, at.turns, branch)
                self.waiting[key] = replace(at, key=key, decided_at_turn=at.turns, consecutive=consecutive)
        self.budget.decide(at.key, at.turns, forks)
        return consecutive

    def _grow_on(self) -> None:
        """Start the branches that the budget grants; trajectories from the prompt fill slots that no branch can use."""
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
        ended = None
        while ended is None:
            at = await self._turn(at)
            then = await self.builder.settle(at.path, {"key": list(at.key)})
            for answer in then.segments:
                at = self._add(at, answer)
            if (ended := then.ended) is None:
                at = replace(at, turns=at.turns + 1)
        self.ended[at.key] = at, ended
        if self.budget is not None and at.may_fork:
            self.budget.leave(at.key)
            self._grow_on()

    def _add(self, at: Trajectory, segment: Segment) -> Trajectory:
        return replace(at, leaf=self.tree.add(replace(segment, parent=at.leaf)), path=at.path.then(segment))

    async def _turn(self, at: Trajectory) -> Trajectory:
        """Return the trajectory with the model's next turn: up to a tool's closing tag, the turn's end without tools,
        the end of the response, or the last token."""
        pauses = not self.has_tools and self.config.branch_policy != "never" and at.turns < self.turn_limit
        left = self.builder.tokens_left(at.path)
        left = min(left, self.config.max_turn_tokens) if pauses else left
        undecided = at.base is None or at.turns > at.decided_at_turn
        looks = self.config.branch_policy != "never" and at.may_fork and undecided
        state, path, part = at, at.path, 0
        tokens: list[int] = []
        log_probs: list[float] = []
        while True:
            first = looks and part == 0
            limit = min(self.config.entropy_tokens, left) if first else left - len(tokens)
            generation = await self.builder.generate(
                path,
                seed=derived_seed(self.builder.seed, "tokens", at.key, at.turns, part),
                max_tokens=limit,
                stop=stops_after(self.text_of(tokens), [self.config.turn_delimiter]) if pauses else (),
                n_entropy=self.config.entropy_top_k if first else 0,
            )
            tokens, log_probs = [*tokens, *generation.token_ids], [*log_probs, *generation.log_probs]
            path = path.then(Segment(None, generation.token_ids))
            if first:
                at = self._look(state, mean_entropy(generation.entropies, self.builder.vocab_size))
            part += 1
            if len(tokens) >= left or self.builder.ends(path) is not Ends.NO:
                break
            if pauses and self.config.turn_delimiter in self.text_of(tokens):
                break
        return self._add(at, Segment(None, tokens, log_probs, info=SegmentInfo(notes={"key": list(at.key)})))

    def _look(self, at: Trajectory, entropy: float) -> Trajectory:
        """Return the state before a turn, updated with the mean entropy of the turn's first tokens."""
        if at.base is None:
            self.seen["entropy_after_prompt"].append(entropy)
            return replace(at, base=entropy)
        self.seen[self._after_turn].append(entropy)
        if self.budget is None:
            self.held.append((at, entropy))
            return replace(at, decided_at_turn=at.turns)
        consecutive = self._decide(at, entropy)
        self._grow_on()
        return replace(at, decided_at_turn=at.turns, consecutive=consecutive)

    def _metrics(self) -> dict[str, float]:
        """Return the group's metrics; shared parts count once, except in `tool_calls_per_trajectory`."""
        ended = [trajectory.path for trajectory, _ in self.ended.values()]
        made, held = sum(len(s.token_ids) for s in self.tree.segments), sum(len(path.tokens) for path in ended)
        metrics = {
            "initial_rollouts": self.initial,
            "forks": self.counts["forks"],
            "filled": self.counts["filled"],
            "shared_tokens": 1 - made / held,
            "distinct_trajectories": len({path.tokens for path in ended}),
            "ended_at_length": fmean(why is Ended.LENGTH for _, why in self.ended.values()),
        }
        if self.has_tools:
            metrics["tool_calls_per_trajectory"] = fmean(path.calls for path in ended)
            metrics["ended_at_call_limit"] = fmean(why is Ended.CALL_LIMIT for _, why in self.ended.values())
        metrics |= {name: fmean(values) for name, values in self.seen.items()}
        return {name: float(value) for name, value in metrics.items()}
