"""HATO's search as a tree policy: the search says what to expand, the engine continues.

    a round    search.next() -> expansions -> all their children at once -> R_local -> features -> V, U -> the tree

Only the rounds of one tree wait for each other. With tools, a step also ends with a call, and the tool's result belongs
to it; a step that runs to the final answer goes through all its calls.
"""

import asyncio
import copy
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from verl.utils.entropy_estimate import mean_entropy
from verl.utils.parts import register_tree
from verl.utils.token_fields import TokenField
from verl.workers.config.keys import ACTOR, ROLLOUT
from verl.workers.rollout.answer_likelihood import ANSWER_LIKELIHOOD
from verl.workers.rollout.engines.interface import gather_or_cancel
from verl.workers.rollout.prompt_task import PromptTask
from verl.workers.rollout.trajectory_tree import DROPPED_STEPS, MODEL, TOOL, Segment, SegmentInfo, TrajectoryTree
from verl.workers.rollout.tree_builder import BranchPolicy, Continuation, Path, Score, TreeBuilder
from verl.workers.rollout.trees.hato.config import DRAWS, LOCAL_REWARDS, REWARD_LOOP, HATOConfig
from verl.workers.rollout.trees.hato.frontier import Frontier
from verl.workers.rollout.trees.hato.local_reward import LocalReward, Step, local_reward, local_reward_function
from verl.workers.rollout.trees.hato.search import Expansion, Search
from verl.workers.rollout.trees.hato.step_features import FEATURES, agreement, step_features
from verl.workers.rollout.trees.hato.value_model import ValueModel, unpack, value_model_of

# in extra_fields of a prompt's first row: {"segments", "features", "values"}, of every step that was kept its segment's
# id, what the value model saw, and V
HATO_STEPS = "hato_steps"
# in the extra_info of a step that the reward loop scores: {"before", "step"}, texts
STEP_INFO = "hato_step"


@register_tree(
    "hato",
    "HATO (design notes, no paper): a tree of reasoning steps for each prompt, searched by value and uncertainty; 1 to "
    "n trajectories, a leaf each",
    requires="actor.loss_agg_mode=token-mean, and rollout.n of at least 2",
    keys=HATOConfig,
    section="hato",
    values={
        f"{ROLLOUT}.temperature": "${hato.exploration.initial_temperature}",
        f"{ACTOR}.loss_agg_mode": "token-mean",
    },
    rollout_names=("hato",),
)
class Policy(BranchPolicy):
    """`tree=hato`: 1 to n trajectories, a leaf each; with `hato.tree.train_dropped` first the answers, then steps that
    the search has dropped, as many as there are rows left.

    Args:
        config: everything under `hato`.
        value_model: V and U of a step; one for all prompts of a worker, as new as the newest prompt's settings.
        local_reward: R_local of a step; may be a coroutine function. None: the reward loop's.
        decode: token ids to text, for local rewards that read it.
        temperature: of sampling; None: the prompt's.
    """

    fields: tuple[TokenField, ...] = (LOCAL_REWARDS, DRAWS)

    def __init__(
        self,
        config: HATOConfig,
        value_model: ValueModel,
        local_reward: LocalReward | None,
        decode: Callable[[Sequence[int]], str] | None = None,
        temperature: float | None = None,
    ):
        self.config, self.bounds, self.value_model = config, config.tree, value_model
        self.local_reward, self.decode, self.temperature = local_reward, decode, temperature
        self.learnt = -1  # batches that the value model has learnt from; not the trainer's yet
        if config.tree.train_dropped:
            self.fields = (*self.fields, DROPPED_STEPS)

    @classmethod
    def from_config(cls, config, tokenizer=None) -> "Policy":
        hato = HATOConfig.from_dict(config.get("hato") or {})
        by_name = hato.local_reward not in (REWARD_LOOP, ANSWER_LIKELIHOOD)
        return cls(
            hato,
            value_model_of(hato, config.actor_rollout_ref.rollout.seed),
            local_reward_function(hato.local_reward) if by_name else None,
            None if tokenizer is None else tokenizer.decode,
        )

    def for_task(self, task: PromptTask, score: Score | None) -> "Policy":
        """Return the policy for a prompt, whose settings may have `learnt` (number of batches that the value model has
        learnt from), `value_model` (packed), `temperature` and `max_nodes`."""
        settings = task.settings.tree
        if settings.get("learnt", -1) > self.learnt:
            self.value_model.load_state_dict(unpack(settings["value_model"]))
            self.learnt = settings["learnt"]
        policy = copy.copy(self)
        policy.temperature = settings.get("temperature")
        if "max_nodes" in settings:
            policy.bounds = replace(self.bounds, max_nodes=settings["max_nodes"])
        if self.config.local_reward == REWARD_LOOP:
            policy.local_reward = self._by_the_reward_loop(score)
        return policy

    def _by_the_reward_loop(self, score: Score | None) -> LocalReward:
        if score is None:
            raise ValueError(f"hato.local_reward={REWARD_LOOP} needs rewards that are computed during the rollout")

        async def of_step(step: Step) -> float:
            about = {"before": self.decode(step.before), "step": self.decode(step.tokens)}
            return await score([*step.before, *step.tokens], {STEP_INFO: about})

        return of_step

    async def grow(self, builder: TreeBuilder, n: int) -> None:
        shape = self.config.tree
        frontier = Frontier(builder.tree, merges=not shape.independent_paths, keeps_tokens=shape.train_dropped)
        search = Search(frontier, self.bounds, self.config.exploration, n_leaves=n, seed=builder.seed)
        while expansions := search.next():
            await Round(self, builder, frontier).grow(expansions)
        ends, metrics = frontier.leaves(), frontier.metrics()
        if shape.train_dropped:
            dropped = frontier.train_dropped(n - len(ends), builder.seed)
            metrics |= {"dropped_steps": float(len(frontier.dropped)), "dropped_rows": float(len(dropped))}
            ends += dropped
        builder.tree.leaves = [frontier.steps[end].segments[-1] for end in ends]
        builder.tree.metrics = metrics

    def about_tree(self, tree: TrajectoryTree) -> dict:
        """What the value model learns from: the steps that lead to answers."""
        answers = [leaf for leaf in tree.leaves if not tree.is_dropped(leaf)]
        kept = sorted({i for leaf in answers for i in tree.path(leaf)})
        steps = {i: tree.segments[i].info.for_trainer for i in kept if tree.segments[i].info.for_trainer}
        about = {
            "segments": list(steps),
            "features": [step["features"] for step in steps.values()],
            "values": [step["value"] for step in steps.values()],
        }
        return {HATO_STEPS: about}


@dataclass(frozen=True)
class Drawn:
    """A step that has been drawn and is not yet in the tree.

    Args:
        node: the step that it follows.
        before: the response up to there.
        most_tokens: that the model might have written.
        segments: its own; their parents are not set.
        ended: the path ends with it.
    """

    node: int
    before: Path
    most_tokens: int
    segments: list[Segment]
    ended: bool

    @property
    def tokens(self) -> tuple[int, ...]:
        """Up to the last token by the model: without the result of a call that the step ends with."""
        own = self.segments[:-1] if self.segments[-1].author == TOOL else self.segments
        return tuple(token for segment in own for token in segment.token_ids)

    @property
    def by_model(self) -> list[Segment]:
        return [segment for segment in self.segments if segment.author == MODEL]

    @cached_property
    def different_tokens(self) -> set[int]:
        """That the model wrote."""
        return {token for segment in self.by_model for token in segment.token_ids}


class Round:
    """The children of some steps, drawn together."""

    def __init__(self, policy: Policy, builder: TreeBuilder, frontier: Frontier):
        self.policy, self.builder, self.frontier, self.config = policy, builder, frontier, policy.config
        self.settled: dict[tuple[int, Path], asyncio.Task] = {}

    async def grow(self, expansions: Sequence[Expansion]) -> None:
        """Draw all children and add them to the tree."""
        drawn = await gather_or_cancel(*(self._draw(each, i) for each in expansions for i in range(each.children)))
        # identical siblings are one step: a process reward model is asked once
        different = {(step.node, step.tokens): step for step in drawn}
        scores = await gather_or_cancel(*(self._local(step) for step in different.values()))
        score_of = dict(zip(different, scores, strict=True))
        local = [score_of[step.node, step.tokens] for step in drawn]
        features = [self._features(step, drawn, reward) for step, reward in zip(drawn, local, strict=True)]
        values, uncertainties = (column.tolist() for column in self.policy.value_model.predict(features))
        for i, step in enumerate(drawn):
            for segment in step.segments:
                segment.info.fields[LOCAL_REWARDS.name] = local[i]
                segment.info.entropies = None
            step.segments[-1].info.ends_step = True
            first = step.segments[0].info
            first.for_trainer |= {"value": values[i], "features": features[i]}
            entropy = features[i][FEATURES.index("mean_entropy")]
            first.notes |= {"value": values[i], "uncertainty": uncertainties[i], "entropy": entropy}
            self.frontier.add(step.node, step.segments, ended=step.ended, value=values[i], uncertainty=uncertainties[i])

    async def _draw(self, expansion: Expansion, child: int) -> Drawn:
        builder, before = self.builder, self.frontier.path(expansion.node)
        seed = random.Random(f"{builder.seed} {expansion.node} {child}").getrandbits(31)
        most, n_entropy = builder.tokens_left(before), self.config.uncertainty.entropy_top_k
        temperature = self.policy.temperature
        if expansion.to_the_end:
            segments = await builder.finish(before, seed, temperature, n_entropy)
            return Drawn(expansion.node, before, most, segments, ended=True)
        most, stop = min(most, self.config.tree.max_step_tokens), (self.config.tree.step_delimiter,)
        generation = await builder.generate(
            before, seed=seed, max_tokens=most, stop=stop, temperature=temperature, n_entropy=n_entropy
        )
        entropies = generation.entropies if n_entropy else None
        segment = Segment(None, generation.token_ids, generation.log_probs, info=SegmentInfo(entropies=entropies))
        then = await self._settle(expansion.node, before.then(segment))
        return Drawn(expansion.node, before, most, [segment, *then.segments], then.ended is not None)

    async def _settle(self, node: int, path: Path) -> Continuation:
        """Return what the environment says of a step after `node`; identical siblings call it once."""
        if (node, path) not in self.settled:
            self.settled[node, path] = asyncio.ensure_future(self.builder.settle(path))
        return await self.settled[node, path]

    def _features(self, step: Drawn, drawn: Sequence[Drawn], local: float) -> list[float]:
        """What the value model sees of a step of those drawn together."""
        siblings = [other.different_tokens for other in drawn if other.node == step.node and other is not step]
        log_probs = [p for segment in step.by_model for p in segment.log_probs]
        entropies = [h for segment in step.by_model for h in segment.info.entropies or ()]
        return step_features(
            log_probs=log_probs,
            entropies=[mean_entropy(entropies, self.builder.vocab_size)] if entropies else [],
            path_log_probs=[*self.frontier.path_log_probs(step.node), *log_probs],
            max_tokens=step.most_tokens,
            depth=self.frontier.steps[step.node].depth + 1,
            max_depth=self.config.tree.max_depth,
            siblings_agreement=agreement(step.different_tokens, siblings),
            budget_used=self.frontier.n_kept / self.policy.bounds.max_nodes,
            finished=step.segments[-1].token_ids[-1] in self.builder.stop_token_ids,
            local_reward=local,
        )

    async def _local(self, drawn: Drawn) -> float:
        if self.config.local_reward == ANSWER_LIKELIHOOD:
            likelihood = self.builder.answer_likelihood
            if likelihood is None:
                raise ValueError(f"hato.local_reward={ANSWER_LIKELIHOOD}: this rollout has no reference answers")
            written = [token for segment in drawn.segments for token in segment.token_ids]
            return min(1.0, math.exp(await likelihood.log_prob([*drawn.before.tokens, *written])))
        step = Step(
            problem=self.builder.tree.prompt_ids,
            before=list(drawn.before.tokens),
            parent=self.frontier.written(drawn.node),
            tokens=list(drawn.tokens),
            decode=self.policy.decode,
        )
        return await local_reward(self.policy.local_reward, step)
