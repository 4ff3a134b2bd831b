"""A prompt's tree as rows of verl's batch: `grow` with what a run's config and verl's agent loop worker give it."""

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.utils.config import omega_conf_to_dataclass

from verl.workers.config.explore import parts_of
from verl.workers.rollout.engines.interface import (
    Generation,
    GenerationRequest,
    RolloutEngine,
    end_of_sequence_ids,
    generation_config_of,
)
from verl.workers.rollout.environment import NO_ENVIRONMENT, Environment, Tools
from verl.workers.rollout.prompt_task import PromptTask
from verl.workers.rollout.tools.protocol import Protocol
from verl.workers.rollout.tools.tool_box import ToolBox, try_tools
from verl.workers.rollout.trajectory_tree import (
    SEGMENT_IDS,
    TOOL,
    TOOL_FAULTS,
    TREE,
    TREE_METRICS,
    TrajectoryTree,
    writes_trees,
)
from verl.workers.rollout.tree_builder import BranchPolicy, Sampling, Score, grow, policy_class
from verl.workers.rollout.weight_versions import WeightVersions


class TrajectoryOutput(AgentLoopOutput):
    """Upstream's output with fields that have a number for every response token."""

    token_fields: dict[str, Any] = {}

    def as_dict(self) -> dict[str, Any]:
        row = super().as_dict()
        return row | {name: torch.tensor(values) for name, values in row.pop("token_fields", {}).items()}


class TreeRollout:
    """Makes all trajectories of one prompt. One instance per worker; `run` is called for many prompts at once.

    Args:
        config: the whole config of the run.
        agent_loop: upstream's single-turn agent loop: how a prompt becomes token ids.
        engine: where tokens come from.
        tokenizer: the model's.
    """

    # upstream's `_compute_score(outputs, kwargs)`, which sets reward_score and reward_extra_info of the last output.
    # None: rewards are not computed during the rollout
    compute_score: Callable | None = None

    def __init__(self, config, agent_loop: SingleTurnAgentLoop, engine: RolloutEngine, tokenizer):
        self.config, self.agent_loop, self.engine, self.tokenizer = config, agent_loop, engine, tokenizer
        self.stop_token_ids = end_of_sequence_ids(tokenizer, generation_config_of(tokenizer.name_or_path))
        parts = parts_of(config.actor_rollout_ref.rollout)
        self.policy = policy_class(parts.tree or "plain").from_config(config, tokenizer)
        self.plain = policy_class("plain").from_config(config, tokenizer)
        self.environment = environment_of(config, tokenizer)
        # what a reward function would have said of a row without an answer: group filters compare it with the others'
        filters = config.algorithm.get("filter_groups") or {}
        self.about_dropped = {filters["metric"]: 0.0} if filters.get("enable") and filters.get("metric") else {}

    @property
    def validates(self) -> bool:
        """Whether validation needs the environment; else upstream's single-turn agent loop could do it."""
        return self.environment is not NO_ENVIRONMENT

    async def run(
        self, task: PromptTask, n: int, sampling_params: dict[str, Any], plain: bool = False
    ) -> list[TrajectoryOutput]:
        """Return the trajectories of a prompt, 1 to n.

        Args:
            task: the prompt and its settings.
            n: number of trajectories.
            sampling_params: temperature, top_p, top_k, … of ordinary sampling.
            plain: n independent ones, as in validation, whatever the policy, and at the plain temperature.

        Requests to the engine have the prompt's `uid` as their `request_id`: they go to one server, which is given
        back when this has ended.
        """
        started = time.perf_counter()
        prompt_ids = list(await self.agent_loop.ct_build_initial_tokens(list(task.row["raw_prompt"])))
        policy = self.plain if plain else self.policy.for_task(task, self._score(task.row, prompt_ids))
        engine = GroupEngine(self.engine, sampling_params)
        tree = await grow(
            engine,
            prompt_ids,
            n,
            policy,
            environment=self.environment,
            sampling=Sampling(*(sampling_params[name] for name in ("temperature", "top_p", "top_k"))),
            max_tokens=self.response_tokens(len(prompt_ids)),
            stop_token_ids=self.stop_token_ids,
            vocab_size=len(self.tokenizer),
            seed=self.seed_of(task),
            request_id=task.row["uid"],
        )
        tree.metrics |= {"tokens_generated": float(engine.tokens)} | engine.versions.metrics()
        outputs = rows_of(tree, policy, engine.versions, time.perf_counter() - started)
        for output in outputs:
            if output.reward_score is not None:
                output.extra_fields["reward_extra_info"] = dict(self.about_dropped)
        outputs[0].extra_fields |= policy.about_tree(tree) | self._about_group(tree, task.step)
        return outputs

    def seed_of(self, task: PromptTask) -> int:
        """Depends on the run's seed, the training step, the row (its `index`, which may be missing, and its text), and
        how often the step has had this row before."""
        seed = self.config.actor_rollout_ref.rollout.seed
        row = f"{task.row.get('index')} {list(task.row.get('raw_prompt', ()))}"
        again = task.settings.occurrence
        return random.Random(f"{seed} {task.step} {row}{f' {again}' if again else ''}").getrandbits(31)

    def response_tokens(self, prompt_tokens: int) -> int:
        """Tokens that a response may have, as upstream's server counts them."""
        rollout = self.config.actor_rollout_ref.rollout
        context = rollout.get("max_model_len") or rollout.prompt_length + rollout.response_length
        tokens = min(rollout.response_length, context - prompt_tokens)
        if tokens < 1:
            raise ValueError(f"a prompt of {prompt_tokens} tokens leaves none for a response in a context of {context}")
        return tokens

    def _score(self, prompt: Mapping[str, Any], prompt_ids: list[int]) -> Score | None:
        if self.compute_score is None:
            return None

        async def score(tokens, about: dict) -> float:
            output = AgentLoopOutput(
                prompt_ids=prompt_ids,
                response_ids=list(tokens),
                response_mask=[1] * len(tokens),
                num_turns=2,
                metrics=AgentLoopMetrics(),
                extra_fields={},
            )
            info = {**(prompt.get("extra_info") or {}), **about}
            await self.compute_score([output], {**prompt, "session_id": 0, "extra_info": info})
            return output.reward_score

        return score

    def _about_group(self, tree: TrajectoryTree, step: int) -> dict[str, Any]:
        """Metrics, the tools' own faults, and the tree in the steps in which the trainer writes it down."""
        about = {TREE_METRICS: tree.metrics}
        calls = [segment.info.call for segment in tree.segments if segment.info.call]
        if faults := {call["tool"]: call["fault"] for call in calls if "fault" in call}:
            about[TOOL_FAULTS] = faults
        return about | ({TREE: tree.to_json()} if writes_trees(self.config, step) else {})


def environment_of(config, tokenizer) -> Environment:
    """The environment of a run's config; its tools are loaded. Raises ValueError if one of them does not work."""
    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    if parts_of(rollout).environment == "none":
        return NO_ENVIRONMENT
    tools = ToolBox(rollout.tools)
    try_tools(rollout.tools)
    return Tools(tools, Protocol(tokenizer, list(tools.tools)))


def rows_of(
    tree: TrajectoryTree, policy: BranchPolicy, versions: WeightVersions | None = None, seconds: float = 0.0
) -> list[TrajectoryOutput]:
    """A row of the batch for each of the tree's leaves, in their order; one without an answer has reward 0 already.

    `response_mask` says who wrote a token. Token fields: `segment_ids`, of which equal ones in a prompt's rows are the
    same shared token, and the policy's own `fields`.

    Args:
        tree: of `grow`.
        policy: what made it.
        versions: of the weights that made the tree, for upstream's staleness metrics.
        seconds: that it took.
    """
    columns = zip(tree.leaves, tree.trajectories(), tree.response_masks(), tree.log_probs(), strict=True)
    versions, rows = versions or WeightVersions(), []
    for leaf, tokens, mask, log_probs in columns:
        path = [(i, tree.segments[i]) for i in tree.path(leaf)]
        calls = [segment.info.call or {} for _, segment in path if segment.author == TOOL]
        fields = {SEGMENT_IDS.name: [i for i, segment in path for _ in segment.token_ids]}
        for need in policy.fields:
            fields[need.name] = [
                segment.info.fields.get(need.name, need.unsent) for _, segment in path for _ in segment.token_ids
            ]
        rows.append(
            TrajectoryOutput(
                prompt_ids=tree.prompt_ids,
                response_ids=tokens,
                response_mask=mask,
                response_logprobs=log_probs,
                num_turns=2 + 2 * len(calls),
                metrics=AgentLoopMetrics(
                    generate_sequences=seconds, tool_calls=sum(call.get("seconds", 0.0) for call in calls)
                ),
                extra_fields={"turn_scores": [], "tool_rewards": []} | versions.of([*tree.prompt_ids, *tokens], mask),
                token_fields=fields,
            )
        )
        if tree.is_dropped(leaf):
            rows[-1].reward_score = 0.0
    return rows


class GroupEngine(RolloutEngine):
    """A group's engine: it counts the tokens it made, remembers their weights' versions, and passes the sampler's
    settings of the group's prompt on with every request.

    Args:
        sampling_params: of the group; its `extra_args`, if any, go with every request.
    """

    def __init__(self, engine: RolloutEngine, sampling_params: dict[str, Any] | None = None):
        self.engine, self.versions, self.tokens = engine, WeightVersions(), 0
        extra_args = (sampling_params or {}).get("extra_args")
        self.extra = {"extra_args": extra_args} if extra_args else {}

    async def generate(self, request: GenerationRequest) -> Generation:
        generation = await self.engine.generate(replace(request, **self.extra))
        self.versions.add(request.prompt_ids, generation)
        self.tokens += len(generation.token_ids)
        return generation
