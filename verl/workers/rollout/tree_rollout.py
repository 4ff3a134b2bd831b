"""Grows a prompt's tree by a run's config inside verl's agent loop worker, and converts it to rows of verl's batch."""

import math
import pickle
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

from verl.utils.parts import credit_of, tree_part
from verl.workers.config.explore import parts_of
from verl.workers.engine.prefix_tree.trie import distinct_tokens
from verl.workers.rollout.answer_likelihood import (
    ANSWER_GAINS,
    AnswerLikelihood,
    answer_gains,
    closing_text,
    reference_answers,
)
from verl.workers.rollout.contexts import CONTEXTS, contexts_cell, trained_contexts
from verl.workers.rollout.engines.interface import Generation, GenerationRequest, RolloutEngine, end_of_sequence_ids
from verl.workers.rollout.environment import NO_ENVIRONMENT, Environment
from verl.workers.rollout.prompt_task import PromptTask
from verl.workers.rollout.rows import as_array
from verl.workers.rollout.run_environment import context_rule_of, environment_keys, environment_of
from verl.workers.rollout.trajectory_tree import (
    SEGMENT_IDS,
    TOOL,
    TOOL_FAULTS,
    TREE,
    TREE_DATA,
    TREE_METRICS,
    TrajectoryTree,
    writes_trees,
)
from verl.workers.rollout.tree_builder import BranchPolicy, Sampling, Score, grow

TOKEN_LISTS = ("prompt_ids", "response_ids", "response_mask", "response_logprobs")  # numbers for each token


class TrajectoryOutput(AgentLoopOutput):
    """Upstream's output with token fields, which hold a number for every response token, and rewards of turns.
    `turn_rewards` maps the number of tokens up to a turn's end to its reward, which stands at the turn's last token.
    Their sum is `reward_score`. `contexts` (contexts.py) is None in runs whose rollouts cannot have any."""

    token_fields: dict[str, Any] = {}
    turn_rewards: dict[int, float] = {}
    contexts: list[Any] | None = None

    def model_dump(self, **options) -> dict[str, Any]:
        """Return the fields, of which `TOKEN_LISTS` are arrays: upstream's `as_dict` makes tensors of them, and torch
        reads lists slowly."""
        arrays = {name: as_array(values) for name in TOKEN_LISTS if (values := getattr(self, name)) is not None}
        return super().model_dump(exclude={*TOKEN_LISTS, "token_fields"}, **options) | arrays

    def as_dict(self) -> dict[str, Any]:
        row = super().as_dict()
        if (contexts := row.pop("contexts", None)) is not None:
            row[CONTEXTS] = torch.from_numpy(contexts_cell(contexts))
        if rewards := row.pop("turn_rewards", {}):
            row["rm_scores"] = torch.zeros_like(row["rm_scores"])
            row["rm_scores"][[end - 1 for end in rewards]] = torch.tensor(list(rewards.values()))
        if contexts and contexts[-1][1] is None:  # the reward of what is not trained goes to the last trained token
            last = int(row["response_mask"].nonzero()[-1])
            row["rm_scores"][last] = row["rm_scores"][last:].sum()
            row["rm_scores"][last + 1 :] = 0
        return row | {name: torch.tensor(as_array(values)) for name, values in self.token_fields.items()}


class TreeRollout:
    """Makes all trajectories of a prompt. A worker has one instance, whose `run` serves many prompts concurrently.
    `config` is the config of the whole run. `agent_loop` is upstream's single-turn agent loop, which tokenizes prompts.
    `environment` is one that runs already; None makes that of the config."""

    # upstream's `_compute_score(outputs, kwargs)`, which sets reward_score and reward_extra_info of the last output;
    # None if rewards are not computed during the rollout
    compute_score: Callable | None = None

    def __init__(
        self,
        config,
        agent_loop: SingleTurnAgentLoop,
        engine: RolloutEngine,
        tokenizer,
        environment: Environment | None = None,
    ):
        self.config, self.agent_loop, self.engine, self.tokenizer = config, agent_loop, engine, tokenizer
        self.stop_token_ids = end_of_sequence_ids(tokenizer, tokenizer.name_or_path)
        parts = parts_of(config.actor_rollout_ref.rollout)
        self.policy = tree_part(parts.tree or "plain").policy.from_config(config, tokenizer)
        self.plain = tree_part("plain").policy.from_config(config, tokenizer)
        # a run's agent loop has upstream's builder; only environment=chat needs it
        builder = getattr(agent_loop, "continuous_token_builder", None)
        self.environment = environment or environment_of(config, tokenizer, builder)
        self.context_rule = context_rule_of(config, tokenizer)
        credit = credit_of(config.algorithm.adv_estimator)
        # keys of the run's credit if it reads gains of the answer's likelihood, else None
        self.gains = credit.read(config.algorithm) if credit and ANSWER_GAINS in credit.needs else None
        filters = config.algorithm.get("filter_groups") or {}
        # number of the reward function by which group filters compare a prompt's rows; empty without filters
        self.filter_metric = (filters.get("enable") and filters.get("metric")) or ""

    @property
    def validates(self) -> bool:
        """Return whether validation needs the environment; without it upstream's single-turn agent loop suffices."""
        return self.environment is not NO_ENVIRONMENT

    async def run(
        self, task: PromptTask, n: int, sampling_params: dict[str, Any], plain: bool = False
    ) -> list[TrajectoryOutput]:
        """Return 1 to n trajectories of a prompt: a tree's, or with `plain`, as in validation, independent ones.
        `sampling_params` are those of ordinary sampling. The prompt's `uid` is the `request_id` of all requests to the
        engine, so that they go to one server."""
        engine = GroupEngine(self.engine, sampling_params)
        async with self.environment.opened(task.row, self.seed_of(task)) as environment:
            started = time.perf_counter()
            tree, policy = await self.grow_tree(environment, task, n, sampling_params, engine, plain)
            seconds = time.perf_counter() - started
        tree.metrics["tokens_generated"] = float(engine.tokens)
        if engine.versions:
            tree.metrics["weight_versions"] = float(len(engine.versions))
        outputs = rows_of(tree, policy, engine.versions, seconds)
        if self.changes_contexts:
            tree.metrics |= self._set_contexts(outputs, tree)
        if self.gains is not None:
            likelihood = self._answer_likelihood(engine, task.row)
            gains = await answer_gains(tree, likelihood, self.gains.log_prob)
            for output, values in zip(outputs, gains, strict=True):
                output.token_fields[ANSWER_GAINS.name] = values
            tree.metrics["likelihoods_left_out"] = float(likelihood.left_out)
        for output in outputs:
            if output.reward_score is not None:  # the reward loop does not score it
                info = {self.filter_metric: output.reward_score} if self.filter_metric else {}
                output.extra_fields["reward_extra_info"] = info
        if (data := policy.data_for_trainer(tree)) is not None:
            outputs[0].extra_fields[TREE_DATA] = pickle.dumps(data)
        outputs[0].extra_fields |= self._group_extra_fields(tree, task.step)
        return outputs

    async def grow_tree(
        self,
        environment: Environment,
        task: PromptTask,
        n: int,
        sampling_params: Mapping[str, Any],
        engine: RolloutEngine,
        plain: bool = False,
    ) -> tuple[TrajectoryTree, BranchPolicy]:
        """Return a prompt's tree in an opened environment, and the policy that grew it; see `run`."""
        prompt_ids = await self._prompt_ids(environment, task.row["raw_prompt"])
        policy = self.plain if plain else self.policy.for_task(task)
        tree = await grow(
            engine,
            prompt_ids,
            n,
            policy,
            environment=environment,
            sampling=Sampling(*(sampling_params[name] for name in ("temperature", "top_p", "top_k"))),
            **self._limits(len(prompt_ids)),
            context_rule=self.context_rule,
            stop_token_ids=self.stop_token_ids,
            vocab_size=len(self.tokenizer),
            seed=self.seed_of(task),
            request_id=task.row["uid"],
            score=self._score(task.row, prompt_ids),
        )
        return tree, policy

    async def _prompt_ids(self, environment: Environment, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return a prompt's tokens, with what the environment adds to its messages."""
        described = await environment.first_messages(messages)
        prompt_ids = list(await self.agent_loop.ct_build_initial_tokens(described, tools=environment.schemas))
        most = self.config.actor_rollout_ref.rollout.prompt_length
        # at this length upstream may have cut the prompt, and the description with it
        if (environment.schemas or described != list(messages)) and len(prompt_ids) >= most:
            raise ValueError(
                f"data.max_prompt_length={most} leaves no room for what the environment adds to this prompt, tools' "
                "descriptions or an observation: raise it, leave out longer rows, or name fewer tools"
            )
        return prompt_ids

    def seed_of(self, task: PromptTask) -> int:
        """Return a seed that follows from the run's seed, the step, the row's text and `index`, and its occurrence."""
        seed, again = self.config.actor_rollout_ref.rollout.seed, task.settings.occurrence
        row = f"{task.row.get('index')} {list(task.row.get('raw_prompt', ()))}"
        return random.Random(f"{seed} {task.step} {row}{f' {again}' if again else ''}").getrandbits(31)

    @property
    def changes_contexts(self) -> bool:
        return self.context_rule is not None or self.environment.changes_contexts

    def _limits(self, prompt_tokens: int) -> dict[str, int]:
        """Return the builder's limits: of a response, and with contexts of its own, of each request."""
        most, rollout = self.response_tokens(prompt_tokens), self.config.actor_rollout_ref.rollout
        if not self.changes_contexts:
            return {"max_tokens": most}
        return {"max_tokens": rollout.response_length, "max_model_len": most_tokens(rollout)}

    def _set_contexts(self, outputs: Sequence[TrajectoryOutput], tree: TrajectoryTree) -> dict[str, float]:
        """Set the rows' contexts, trained as far as `environment.max_rows` and micro-batches allow; return metrics."""
        keys, budget = environment_keys(self.config), least_budget(self.config.actor_rollout_ref)
        n_sequences, untrained = 0, 0
        for output, leaf in zip(outputs, tree.leaves, strict=True):
            contexts = tree.contexts(leaf)
            row = [*output.prompt_ids, *output.response_ids]
            n_sequences += 1 + len(contexts)
            output.contexts = trained_contexts(row, contexts, keys.max_rows, budget, distinct_tokens)
            if output.contexts and output.contexts[-1].ids is None:
                first = output.contexts[-1].start - len(output.prompt_ids)
                untrained += sum(output.response_mask[first:])
                output.response_mask[first:] = [0] * (len(output.response_mask) - first)
        return {"rows_per_rollout": n_sequences / len(outputs), "untrained_tokens": float(untrained)}

    def response_tokens(self, prompt_tokens: int) -> int:
        """Return the largest number of tokens of a response, which upstream's server computes in the same way."""
        rollout = self.config.actor_rollout_ref.rollout
        if (left := most_tokens(rollout) - prompt_tokens) < 1:
            raise ValueError(f"a prompt of {prompt_tokens} tokens leaves none of {most_tokens(rollout)} for a response")
        return min(rollout.response_length, left)

    def _answer_likelihood(self, engine: RolloutEngine, row: Mapping[str, Any]) -> AnswerLikelihood:
        score = partial(engine.score, request_id=row["uid"])
        context = most_tokens(self.config.actor_rollout_ref.rollout)
        return AnswerLikelihood(score, self.tokenizer, closing_text(self.config), reference_answers(row), context)

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

    def _group_extra_fields(self, tree: TrajectoryTree, step: int) -> dict[str, Any]:
        """Return the tree's metrics, the tools' own faults, and the tree if `writes_trees` holds for this step."""
        about = {TREE_METRICS: tree.metrics}
        calls = [call for segment in tree.segments for call in segment.info.calls]
        if faults := {call["tool"]: call["fault"] for call in calls if "fault" in call}:
            about[TOOL_FAULTS] = faults
        return about | ({TREE: tree.to_json()} if writes_trees(self.config, step) else {})


def rows_of(
    tree: TrajectoryTree, policy: BranchPolicy, versions: Collection[int] = (), seconds: float = 0.0
) -> list[TrajectoryOutput]:
    """Return a row of the batch for each of the tree's leaves, in order, with the token fields `segment_ids` and the
    policy's own. `versions` are those of the weights that made the tree; each row has the oldest and the newest, by
    upstream's names. `seconds` is the time that growing the tree took.

    A row's reward is the sum of the environment's, if it gives rewards. A row that the search dropped has no answer,
    so that its reward is 0. Other rows are scored later.
    """
    token_fields = {SEGMENT_IDS.name: tree.segment_ids()}
    for need in policy.fields:
        token_fields[need.name] = tree.repeated([s.info.fields.get(need.name, need.unsent) for s in tree.segments])
    columns = zip(tree.leaves, tree.trajectories(), tree.response_masks(), tree.log_probs(), strict=True)
    weight_versions = {"min_global_steps": min(versions), "max_global_steps": max(versions)} if versions else {}
    rows = []
    for position, (leaf, tokens, mask, log_probs) in enumerate(columns):
        own = [tree.segments[i] for i in tree.path(leaf)]
        answers = [segment.info.calls for segment in own if segment.author == TOOL and segment.token_ids]
        is_dropped = tree.is_dropped(leaf)
        rewards = tree.turn_rewards[position] if tree.turn_rewards and not is_dropped else {}
        fields = {name: values[position] for name, values in token_fields.items()}
        rows.append(
            TrajectoryOutput(
                prompt_ids=tree.prompt_ids,
                response_ids=tokens,
                response_mask=mask,
                response_logprobs=log_probs,
                num_turns=2 + 2 * len(answers),
                metrics=AgentLoopMetrics(
                    generate_sequences=seconds,
                    tool_calls=sum(call.get("seconds", 0.0) for calls in answers for call in calls),
                ),
                reward_score=math.fsum(rewards.values()) if tree.turn_rewards or is_dropped else None,
                extra_fields={"turn_scores": list(rewards.values()), "tool_rewards": []} | weight_versions,
                token_fields=fields,
                turn_rewards=rewards,
            )
        )
    return rows


def least_budget(config) -> float:
    """Return the least number of tokens of a micro-batch by the section `actor_rollout_ref`."""
    budgets = [config.actor.ppo_max_token_len_per_gpu] if config.actor.use_dynamic_bsz else []
    for section in (config.rollout, config.ref):
        if section.get("log_prob_use_dynamic_bsz") and section.get("log_prob_max_token_len_per_gpu"):
            budgets.append(section.log_prob_max_token_len_per_gpu)
    return min(budgets, default=math.inf)


def most_tokens(rollout) -> int:
    """Return the largest number of tokens of a request and its continuation."""
    return rollout.get("max_model_len") or rollout.prompt_length + rollout.response_length


class GroupEngine(RolloutEngine):
    """An engine for one group: it counts generated tokens, records the versions of their weights, and adds the
    `extra_args` of the group's `sampling_params`, if any, to every request."""

    def __init__(self, engine: RolloutEngine, sampling_params: dict[str, Any] | None = None):
        self.engine, self.tokens = engine, 0
        self.versions: set[int] = set()
        extra_args = (sampling_params or {}).get("extra_args")
        self.extra = {"extra_args": extra_args} if extra_args else {}

    async def generate(self, request: GenerationRequest) -> Generation:
        generation = await self.engine.generate(replace(request, **self.extra))
        self.versions |= {version for _, version in generation.versions}
        self.tokens += len(generation.token_ids)
        return generation

    async def score(self, prompt_ids, continuation_ids, request_id=None) -> list[float]:
        return await self.engine.score(prompt_ids, continuation_ids, request_id)
