"""HATO's search as a tree policy: the search chooses nodes to expand, and the engine generates their children.

    a round    search.next() -> expansions -> all their children at once -> R_local -> features -> V, U -> the tree

Rounds of different trees do not wait for each other. With tools, a step also ends with a call, and the tool's result
belongs to it; a step that runs to the final answer may contain any number of calls.
"""

import asyncio
import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from omegaconf import DictConfig

from recipe.hato.frontier import Frontier
from recipe.hato.keys import DRAWS, LOCAL_REWARDS, REWARD_LOOP, HATOConfig, hato_keys
from recipe.hato.local_reward import LocalReward, Step, local_reward, local_reward_function
from recipe.hato.search import Expansion, NodeBudget, Search
from recipe.hato.value_model import (
    FEATURES,
    KeptSteps,
    SearchState,
    StepEstimate,
    ValueModel,
    agreement,
    step_features,
    unpack,
    value_model_of,
)
from verl.utils.entropy_estimate import mean_entropy
from verl.utils.parts import register_tree
from verl.utils.piece_texts import piece_texts
from verl.utils.token_fields import TokenField
from verl.workers.config.keys import ACTOR, ROLLOUT, check_log_probs
from verl.workers.config.schedule import ASYNCHRONOUS, schedule_of
from verl.workers.rollout.engines.interface import gather_or_cancel
from verl.workers.rollout.prompt_task import PromptTask
from verl.workers.rollout.trajectory_tree import DROPPED_STEPS, MODEL, TOOL, Segment, SegmentInfo, TrajectoryTree
from verl.workers.rollout.tree_builder import BranchPolicy, Ended, Path, Score, TreeBuilder

# Key in the extra_info of a step that the reward loop scores: {"before", "step"} are texts.
STEP_INFO = "hato_step"


def check_tree(config: DictConfig) -> None:
    """Check the keys on which HATO's search depends."""
    hato, rollout = hato_keys(config), config.actor_rollout_ref.rollout
    _check_sizes(rollout.n, hato)
    if (mode := config.actor_rollout_ref.actor.loss_agg_mode) != "token-mean":
        raise ValueError(
            f"{ACTOR}.loss_agg_mode={mode}: a tree of tree=hato has 1 to n rows, and a mean over rows would count "
            "those that are missing: expected token-mean"
        )
    if rollout.temperature != hato.exploration.initial_temperature:
        raise ValueError(
            f"{ROLLOUT}.temperature={rollout.temperature} differs from hato.exploration.initial_temperature="
            f"{hato.exploration.initial_temperature}: leave the first as ${{hato.exploration.initial_temperature}}"
        )
    check_log_probs(rollout, "hato.uncertainty.entropy_top_k", hato.uncertainty.entropy_top_k)
    decay, schedule = hato.exploration.temperature_decay, schedule_of(config)
    if decay and rollout.get("adaptive_temperature"):
        raise ValueError(
            f"{ROLLOUT}.adaptive_temperature with hato.exploration.temperature_decay={decay}: HAPO's sampler works at "
            "temperature 1: expected 0"
        )
    if decay and schedule in ASYNCHRONOUS:
        raise ValueError(
            f"hato.exploration.temperature_decay={decay} with schedule={schedule}: a batch holds responses of several "
            "steps, and the loss knows one temperature: set it to 0, or choose schedule=sync"
        )
    if hato.local_reward != REWARD_LOOP:
        local_reward_function(hato.local_reward)
    later = config.reward.reward_model.enable and not config.reward.reward_model.enable_resource_pool
    keys = [f"hato.local_reward={REWARD_LOOP}"] if hato.local_reward == REWARD_LOOP else []
    keys += ["hato.tree.train_dropped=true"] if hato.tree.train_dropped else []
    if later and keys:
        raise ValueError(
            f"{keys[0]} needs scores during the rollout: reward.reward_model.enable_resource_pool=true, or no reward "
            "model"
        )
    if hato.tree.train_dropped:
        _check_dropped(config.algorithm.adv_estimator, hato)


def _check_dropped(estimator: str, hato: HATOConfig) -> None:
    """Check that the estimator compares the reward of dropped steps, 0, with the rewards of answers."""
    reason = ""
    if estimator == "hato" and hato.reward_weights.beta == hato.reward_weights.gamma == 0:
        reason = "credit=hato with hato.reward_weights.beta and gamma 0: no reward of a row counts"
    elif estimator == "grpo_passk":
        reason = "algorithm.adv_estimator=grpo_passk: only the best row of a prompt is trained"
    if reason:
        raise ValueError(f"hato.tree.train_dropped=true has no effect on {reason}")


def _check_sizes(n: int, hato: HATOConfig) -> None:
    """Check that steps can have siblings; without siblings every advantage is 0."""
    tree, shared = hato.tree, hato.exploration.nodes_per_tree
    sizes = {
        f"{ROLLOUT}.n": n,
        "hato.tree.branching_factor": tree.branching_factor,
        "hato.tree.max_nodes": tree.max_nodes,
        "hato.tree.max_nodes_per_level": tree.max_nodes_per_level,
    }
    if shared:
        sizes["hato.exploration.nodes_per_tree"] = shared
    for key, value in sizes.items():
        if value < 2:
            raise ValueError(f"{key}={value}: every step would be alone, with advantage 0: expected at least 2")
    if shared > tree.max_nodes:
        raise ValueError(
            f"hato.exploration.nodes_per_tree={shared}: no tree holds more than hato.tree.max_nodes={tree.max_nodes}"
        )


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
    learns=True,
    checks=check_tree,
)
class Policy(BranchPolicy):
    """The policy of `tree=hato`: 1 to n trajectories, one per leaf. With `hato.tree.train_dropped`, dropped steps
    follow after the answers and fill the remaining rows.

    Args:
        value_model: model of V and U, shared by all prompts of a worker; `for_task` loads each newer state into it.
        local_reward: function that returns R_local of a step, or a coroutine function; None for the reward loop's.
        decode: function from token ids to text, for local rewards that need the text.
        temperature: sampling temperature; None for the prompt's.
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
        self.learnt = -1  # number of batches the value model was trained on; -1 before the trainer's first state
        if config.tree.train_dropped:
            self.fields = (*self.fields, DROPPED_STEPS)

    @classmethod
    def from_config(cls, config, tokenizer=None) -> "Policy":
        hato = hato_keys(config)
        return cls(
            hato,
            value_model_of(hato, config.actor_rollout_ref.rollout.seed),
            local_reward_function(hato.local_reward) if hato.local_reward != REWARD_LOOP else None,
            None if tokenizer is None else tokenizer.decode,
        )

    def for_task(self, task: PromptTask) -> "Policy":
        """Return the policy for a prompt, for which the trainer may have sent a `SearchState` and a `NodeBudget`."""
        policy = copy.copy(self)
        if (state := task.settings.tree_record(SearchState)) is not None:
            if state.learnt > self.learnt:
                self.value_model.load_state_dict(unpack(state.value_model))
                self.learnt = policy.learnt = state.learnt
            policy.temperature = state.temperature
        if (budget := task.settings.tree_record(NodeBudget)) is not None:
            policy.bounds = replace(self.bounds, max_nodes=budget.max_nodes)
        return policy

    async def grow(self, builder: TreeBuilder, n: int) -> None:
        shape = self.config.tree
        frontier = Frontier(builder.tree, keeps_tokens=shape.train_dropped)
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

    def data_for_trainer(self, tree: TrajectoryTree) -> KeptSteps:
        answers = [leaf for leaf in tree.leaves if not tree.is_dropped(leaf)]
        records = {i: tree.segments[i].info.record for i in sorted({i for leaf in answers for i in tree.path(leaf)})}
        return KeptSteps({i: record for i, record in records.items() if record is not None})


def reward_loop_scorer(score: Score | None) -> LocalReward:
    """Return the local reward of `hato.local_reward=reward_loop`, which lets `score` judge the path up to a step."""
    if score is None:
        raise ValueError(f"hato.local_reward={REWARD_LOOP} needs rewards that are computed during the rollout")

    async def step_reward(step: Step) -> float:
        before, text = piece_texts(step.decode, [step.before, step.tokens])
        return await score([*step.before, *step.tokens], {STEP_INFO: {"before": before, "step": text}})

    return step_reward


@dataclass(frozen=True)
class Drawn:
    """A step that has been drawn and is not yet in the tree.

    Args:
        node: number of the preceding step.
        before: response up to the end of that step.
        max_tokens: largest number of tokens that the model could have written.
        ended: reason why the path ends with the step; None if it goes on.
    """

    node: int
    before: Path
    max_tokens: int
    segments: list[Segment]
    ended: Ended | None

    @property
    def tokens(self) -> tuple[int, ...]:
        """Return the tokens up to the model's last one: a tool's result at the step's end is left out."""
        own = self.segments[:-1] if self.segments[-1].author == TOOL else self.segments
        return tuple(token for segment in own for token in segment.token_ids)

    @property
    def model_segments(self) -> list[Segment]:
        return [segment for segment in self.segments if segment.author == MODEL]

    @cached_property
    def distinct_tokens(self) -> set[int]:
        """Return the set of token ids that the model wrote."""
        return {token for segment in self.model_segments for token in segment.token_ids}


class Round:
    """The children of all steps that one round of the search expands."""

    def __init__(self, policy: Policy, builder: TreeBuilder, frontier: Frontier):
        self.policy, self.builder, self.frontier, self.config = policy, builder, frontier, policy.config
        self.local_reward = policy.local_reward or reward_loop_scorer(builder.score)
        self.settled: dict[tuple[int, Path], asyncio.Task] = {}

    async def grow(self, expansions: Sequence[Expansion]) -> None:
        """Draw all children and add them to the tree."""
        drawn = await gather_or_cancel(*(self._draw(each, i) for each in expansions for i in range(each.children)))
        # Identical siblings are one step, so a process reward model scores them once.
        distinct = {(step.node, step.tokens): step for step in drawn}
        scores = await gather_or_cancel(*(self._local(step) for step in distinct.values()))
        score_of = dict(zip(distinct, scores, strict=True))
        local = [score_of[step.node, step.tokens] for step in drawn]
        features = [self._features(step, drawn, reward) for step, reward in zip(drawn, local, strict=True)]
        values, uncertainties = (column.tolist() for column in self.policy.value_model.predict(features))
        for i, step in enumerate(drawn):
            for segment in step.segments:
                segment.info.fields[LOCAL_REWARDS.name] = local[i]
                segment.info.entropies = None
            step.segments[-1].info.ends_step = True
            first = step.segments[0].info
            first.record = StepEstimate(features[i], values[i])
            entropy = features[i][FEATURES.index("mean_entropy")]
            first.notes |= {"value": values[i], "uncertainty": uncertainties[i], "entropy": entropy}
            ended = step.ended is not None
            self.frontier.add(step.node, step.segments, ended=ended, value=values[i], uncertainty=uncertainties[i])

    async def _draw(self, expansion: Expansion, child: int) -> Drawn:
        builder, before = self.builder, self.frontier.path(expansion.node)
        seed = random.Random(f"{builder.seed} {expansion.node} {child}").getrandbits(31)
        most, n_entropy = builder.tokens_left(before), self.config.uncertainty.entropy_top_k
        temperature = self.policy.temperature
        if expansion.to_the_end:
            then = await builder.continue_to_end(before, seed, temperature, n_entropy)
            return Drawn(expansion.node, before, most, then.segments, then.ended)
        most, stop = min(most, self.config.tree.max_step_tokens), (self.config.tree.step_delimiter,)
        generation = await builder.generate(
            before, seed=seed, max_tokens=most, stop=stop, temperature=temperature, n_entropy=n_entropy
        )
        entropies = generation.entropies if n_entropy else None
        segment = Segment(None, generation.token_ids, generation.log_probs, info=SegmentInfo(entropies=entropies))
        key = expansion.node, before.then(segment)
        if key not in self.settled:  # identical siblings call the environment once
            self.settled[key] = asyncio.ensure_future(builder.settle(key[1]))
        then = await self.settled[key]
        return Drawn(expansion.node, before, most, [segment, *then.segments], then.ended)

    def _features(self, step: Drawn, drawn: Sequence[Drawn], local: float) -> list[float]:
        siblings = [other.distinct_tokens for other in drawn if other.node == step.node and other is not step]
        log_probs = [p for segment in step.model_segments for p in segment.log_probs]
        entropies = [h for segment in step.model_segments for h in segment.info.entropies or ()]
        return step_features(
            log_probs=log_probs,
            entropies=[mean_entropy(entropies, self.builder.vocab_size)] if entropies else [],
            path_log_probs=[*self.frontier.path_log_probs(step.node), *log_probs],
            max_tokens=step.max_tokens,
            depth=self.frontier.steps[step.node].depth + 1,
            max_depth=self.config.tree.max_depth,
            siblings_agreement=agreement(step.distinct_tokens, siblings),
            budget_used=self.frontier.n_kept / self.policy.bounds.max_nodes,
            finished=step.ended is Ended.STOP,
            local_reward=local,
        )

    async def _local(self, drawn: Drawn) -> float:
        step = Step(
            problem=self.builder.tree.prompt_ids,
            before=list(drawn.before.tokens),
            parent=self.frontier.written(drawn.node),
            tokens=list(drawn.tokens),
            decode=self.policy.decode,
        )
        return await local_reward(self.local_reward, step)
