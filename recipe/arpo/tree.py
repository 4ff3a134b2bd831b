"""ARPO and AEPO as a tree policy: trajectories fork where the model is uncertain after a tool's result.

    turn ──> first `entropy_tokens` tokens ──> their entropy: decide whether the state before this turn forks
         └─> to a closing tag, the end, or the last token ──> call the tool, append its result ──> next turn

Without tools a turn ends with `turn_delimiter` or after `max_turn_tokens` tokens, `turn_limit` times at most. Entropies
are means over the first `entropy_tokens` tokens after the prompt (`base`) or after a result (`now`), over log |V|, so
in [0, 1].

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
from typing import Literal

from pydantic import Field
from pydantic.dataclasses import dataclass as keys_dataclass

from recipe.arpo.budget import BranchBudget, Key
from verl.utils.entropy_estimate import mean_entropy
from verl.utils.parts import register_tree
from verl.workers.config.keys import ROLLOUT, STRICT, check_log_probs
from verl.workers.rollout.environment import NO_ENVIRONMENT, Ends
from verl.workers.rollout.tools.protocol import stops_after
from verl.workers.rollout.trajectory_tree import Segment, SegmentInfo
from verl.workers.rollout.tree_builder import BranchPolicy, Ended, Path, TreeBuilder, derived_seed


@keys_dataclass(frozen=True, config=STRICT)
class ARPOConfig:
    """Keys of ARPO and AEPO, directly under actor_rollout_ref.rollout, by the authors' names.

    Args:
        initial_rollouts: number of trajectories that first start from the prompt; others branch off or fill the group.
        beam_size: number of branches after a fork, including the trajectory itself.
        branch_probability, entropy_weight: see `fork_probability`.
        branch_policy: rule for forks: `entropy` (ARPO), `entropy_balanced` (AEPO), `threshold` or `never`.
        branch_penalty: AEPO's penalty for each consecutive fork.
        entropy_tokens: number of tokens after the prompt, and after a result, whose mean entropy is taken.
        entropy_top_k: number of most likely tokens from which each entropy is estimated; vLLM allows at most 20 unless
            engine_kwargs.vllm.max_logprobs is larger.
        enable_dynamic_rollouts: whether initial_rollouts is computed from a probe trajectory's entropies (AEPO).
        dynamic_rollouts_beta: coefficient beta of that computation, see `dynamic_initial_rollouts`.
        turn_delimiter, max_turn_tokens: text that ends a turn without tools, and the largest number of its tokens.
        turn_limit: number of turns without tools after each of which a trajectory may fork; one last turn follows.
    """

    initial_rollouts: int = Field(default=8, ge=1)
    beam_size: int = Field(default=2, ge=1)
    branch_probability: float = Field(default=0.5, ge=0, le=1)
    entropy_weight: float = Field(default=0.2, ge=0)
    branch_policy: Literal["entropy", "entropy_balanced", "threshold", "never"] = "entropy"
    branch_penalty: float = Field(default=0.05, ge=0, le=1)
    entropy_tokens: int = Field(default=20, ge=1)
    entropy_top_k: int = Field(default=20, ge=1)
    enable_dynamic_rollouts: bool = False
    dynamic_rollouts_beta: float = Field(default=0.5, ge=0)
    turn_delimiter: str = Field(default="\n\n", min_length=1)
    max_turn_tokens: int = Field(default=256, ge=1)
    turn_limit: int = Field(default=3, ge=0)

    def __post_init__(self):
        if self.enable_dynamic_rollouts and self.branch_policy == "never":
            raise ValueError(f"{ROLLOUT}.enable_dynamic_rollouts needs a branch_policy other than never")


def fork_probability(now: float, base: float, consecutive: int, config: ARPOConfig) -> float:
    """Return the probability to fork; `consecutive` is the number of consecutive forks at the path's end.

        entropy            branch_probability + entropy_weight (now - base), cut to [0, 1] (ARPO)
        entropy_balanced   the same times max(0, 1 - branch_penalty consecutive) (AEPO)
        threshold          branch_probability if now > entropy_weight base, else 0
        never              0: trajectories are independent

    >>> fork_probability(0.4, 0.1, 0, ARPOConfig(branch_probability=0.5, entropy_weight=0.2))
    0.56
    """
    if config.branch_policy == "never":
        return 0.0
    if config.branch_policy == "threshold":
        return config.branch_probability if now > config.entropy_weight * base else 0.0
    probability = min(1.0, max(0.0, config.branch_probability + config.entropy_weight * (now - base)))
    balanced = config.branch_policy == "entropy_balanced"
    return probability * max(0.0, 1 - config.branch_penalty * consecutive) if balanced else probability


def dynamic_initial_rollouts(n: int, h_root: float, h_tool: float, beta: float) -> int:
    """Return how many of n trajectories start from the prompt in AEPO: n sigmoid(beta (H_root - H_tool)), in [1, n].

    The number is rounded. The entropies are in nats: over log |V|, their difference would be too small to change it.
    """
    return max(1, min(n, round(n / (1 + math.exp(-beta * (h_root - h_tool))))))


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
    """The policy of `tree=arpo`; AEPO is another `branch_policy` with `enable_dynamic_rollouts`. `decode` returns the
    text of tokens, in which `turn_delimiter` ends a turn without tools."""

    def __init__(self, config: ARPOConfig, decode: Callable[[Sequence[int]], str]):
        self.config, self.decode = config, decode

    @classmethod
    def from_config(cls, config, tokenizer=None) -> "Policy":
        rollout = config.actor_rollout_ref.rollout
        arpo = cls.part.read(config)
        if arpo.branch_policy != "never":
            check_log_probs(rollout, f"{ROLLOUT}.entropy_top_k", arpo.entropy_top_k)
        return cls(arpo, tokenizer and tokenizer.decode)

    async def grow(self, builder: TreeBuilder, n: int) -> None:
        await ForkingTrajectories(builder, n, self.config, self.decode).run()


@dataclass(frozen=True)
class Trajectory:
    """A trajectory's state between two turns."""

    key: Key
    leaf: int | None = None  # index of its last segment; None at the prompt
    path: Path = Path()
    turns: int = 0  # number of finished turns, including those before a fork
    decided_at_turn: int = 0  # turn after which it last decided whether to fork; a branch inherits it
    consecutive: int = 0  # number of consecutive forks at the end of its path
    base: float | None = None  # mean entropy after the prompt; None before it has been measured
    may_fork: bool = True  # not if it only fills up the group


class ForkingTrajectories:
    """Grows the n trajectories of one prompt; call `run` once. A failure of the engine fails the whole group."""

    def __init__(self, builder: TreeBuilder, n: int, config: ARPOConfig, decode: Callable[[Sequence[int]], str]):
        self.builder, self.n, self.config, self.decode, self.tree = builder, n, config, decode, builder.tree
        self.has_tools = builder.environment is not NO_ENVIRONMENT
        self.after_turn = "entropy_after_tool" if self.has_tools else "entropy_after_turn"  # name of a metric
        self.turn_limit = builder.environment.call_limit if self.has_tools else config.turn_limit
        self.ended: dict[Key, tuple[Trajectory, Ended]] = {}
        self.counts: Counter[str] = Counter()
        self.seen: defaultdict[str, list[float]] = defaultdict(list)
        self.budget: BranchBudget | None = None
        self.undecided: list[tuple[Trajectory, float]] = []  # the probe's states and entropies, decided after its end
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
        h_turn = fmean(self.seen.get(self.after_turn, [0.0]))  # 0 if no further turn follows
        nats = math.log(self.builder.vocab_size)
        initial = dynamic_initial_rollouts(self.n, h_root * nats, h_turn * nats, self.config.dynamic_rollouts_beta)
        self._open_budget(initial)
        consecutive = 0
        for state, entropy in self.undecided:
            consecutive = self._decide(replace(state, consecutive=consecutive), entropy)
        self.budget.leave((0,))
        return initial

    def _decide(self, at: Trajectory, entropy: float) -> int:
        """Decide whether a state forks, and return the number of consecutive forks on its path."""
        probability = fork_probability(entropy, at.base, at.consecutive, self.config)
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
        for _ in range(self.budget.take_spare()):
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
        config, branches = self.config, self.config.branch_policy != "never"
        can_pause = branches and not self.has_tools and at.turns < self.turn_limit
        left = self.builder.tokens_left(at.path)
        left = min(left, config.max_turn_tokens) if can_pause else left
        measures_entropy = branches and at.may_fork and (at.base is None or at.turns > at.decided_at_turn)
        path, request_number = at.path, 0
        tokens: list[int] = []
        log_probs: list[float] = []
        while True:
            generation = await self.builder.generate(
                path,
                seed=derived_seed(self.builder.seed, "tokens", at.key, at.turns, request_number),
                max_tokens=min(config.entropy_tokens, left) if measures_entropy else left - len(tokens),
                stop=stops_after(self.decode(tokens), [config.turn_delimiter]) if can_pause else (),
                n_entropy=config.entropy_top_k if measures_entropy else 0,
            )
            tokens, log_probs = [*tokens, *generation.token_ids], [*log_probs, *generation.log_probs]
            path = path.then(Segment(None, generation.token_ids))
            if measures_entropy:
                at = self._with_entropy(at, mean_entropy(generation.entropies, self.builder.vocab_size))
            measures_entropy, request_number = False, request_number + 1
            if len(tokens) >= left or self.builder.ends(path) is not Ends.NO:
                break
            if can_pause and config.turn_delimiter in self.decode(tokens):
                break
        return self._add(at, Segment(None, tokens, log_probs, info=SegmentInfo(notes={"key": list(at.key)})))

    def _with_entropy(self, at: Trajectory, entropy: float) -> Trajectory:
        """Return the state before a turn, updated with the mean entropy of the turn's first tokens."""
        if at.base is None:
            self.seen["entropy_after_prompt"].append(entropy)
            return replace(at, base=entropy)
        self.seen[self.after_turn].append(entropy)
        if self.budget is None:
            self.undecided.append((at, entropy))
            return replace(at, decided_at_turn=at.turns)
        consecutive = self._decide(at, entropy)
        self._grow_on()
        return replace(at, decided_at_turn=at.turns, consecutive=consecutive)

    def _metrics(self) -> dict[str, float]:
        """Return the group's metrics; shared parts count once, except in `tool_calls_per_trajectory`."""
        ended = [trajectory.path for trajectory, _ in self.ended.values()]
        generated = sum(len(segment.token_ids) for segment in self.tree.segments)
        metrics = {
            "initial_rollouts": self.initial,
            "forks": self.counts["forks"],
            "filled": self.counts["filled"],
            "shared_tokens": 1 - generated / sum(len(path.tokens) for path in ended),
            "distinct_trajectories": len({path.tokens for path in ended}),
            "ended_at_length": fmean(why is Ended.LENGTH for _, why in self.ended.values()),
        }
        if self.has_tools:
            metrics["tool_calls_per_trajectory"] = fmean(path.calls for path in ended)
            metrics["ended_at_call_limit"] = fmean(why is Ended.CALL_LIMIT for _, why in self.ended.values())
        metrics |= {name: fmean(values) for name, values in self.seen.items()}
        return {name: float(value) for name, value in metrics.items()}
