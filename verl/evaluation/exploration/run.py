"""Grows a group of trajectories for each policy and prompt of a plan on one engine, and measures them (explore.sh).

plain samples ──> trees ──> thresholds proposed from the samples
"""

import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from math import exp
from statistics import fmean
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.reward_loop.reward_loop import RewardLoopWorker

from verl.evaluation.exploration.plan import ExplorationPlan, Prompt, prompt_ids
from verl.evaluation.exploration.table import Certainty, SampledGroup, Samples, Trajectory, measure_groups
from verl.utils.parts import parts
from verl.workers.rollout.engines.interface import Generation, GenerationRequest, RolloutEngine, gather_or_cancel
from verl.workers.rollout.engines.local_vllm import VLLMEngine
from verl.workers.rollout.prompt_task import PromptTask
from verl.workers.rollout.rows import reward_batch
from verl.workers.rollout.run_environment import environment_of
from verl.workers.rollout.trajectory_tree import TrajectoryTree
from verl.workers.rollout.tree_rollout import GroupEngine, TreeRollout, rows_of

# number of most likely tokens from which an entropy is estimated; vLLM reports at most this many by default
ENTROPY_TOP_K = 20


@contextmanager
def running_engine(plan: ExplorationPlan) -> Iterator[VLLMEngine]:
    """Start vLLM with the settings of the run's rollout servers, yield its engine, and shut it down afterwards."""
    rollout = plan.config.actor_rollout_ref.rollout
    variables = OmegaConf.select(plan.config, "ray_kwargs.ray_init.runtime_env.env_vars") or {}
    for name in variables:
        if name.startswith("VLLM_"):
            os.environ.setdefault(name, str(variables[name]))
    names = ("dtype", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "enforce_eager")
    arguments = {name: rollout[name] for name in (*names, "gpu_memory_utilization", "logprobs_mode", "seed")}
    arguments |= OmegaConf.to_container(rollout.engine_kwargs.get("vllm") or OmegaConf.create())
    engine = VLLMEngine.start(
        plan.config.actor_rollout_ref.model.path,
        len(plan.tokenizer),
        tensor_parallel_size=rollout.tensor_model_parallel_size,
        trust_remote_code=plan.config.actor_rollout_ref.model.get("trust_remote_code", False),
        **{name: value for name, value in arguments.items() if value is not None},
    )
    try:
        yield engine
    finally:
        engine.shutdown()


class Recorder(GroupEngine):
    """An engine for one prompt that also records the distribution at each token. It asks for entropies and top
    log-probs with every request, so that measuring costs all policies the same time."""

    def __init__(self, engine: RolloutEngine):
        super().__init__(engine)
        self.steps: dict[int, Certainty] = {}  # hash of the tokens before a step -> the step

    async def generate(self, request: GenerationRequest) -> Generation:
        n_top_logprobs, n_entropy = max(request.n_top_logprobs, 2), max(request.n_entropy, ENTROPY_TOP_K)
        generation = await super().generate(replace(request, n_top_logprobs=n_top_logprobs, n_entropy=n_entropy))
        before = _hash_of(request.prompt_ids)
        for token, entropy, ranked in zip(
            generation.token_ids, generation.entropies or (), generation.top_logprobs or (), strict=True
        ):
            self.steps.setdefault(before, Certainty(entropy, exp(ranked[0][1]), exp(ranked[1][1])))
            before = hash((before, token))
        return generation

    def steps_of(
        self, prompt_ids: Sequence[int], response: Sequence[int], mask: Sequence[int]
    ) -> list[Certainty | None]:
        """Return the recorded step of each token of a response; None where `mask` is 0 (a tool's tokens)."""
        steps, before = [], _hash_of(prompt_ids)
        for token, by_model in zip(response, mask, strict=True):
            steps.append(self.steps[before] if by_model else None)
            before = hash((before, token))
        return steps


def _hash_of(tokens: Sequence[int]) -> int:
    value = 0
    for token in tokens:
        value = hash((value, token))
    return value


# ---- growing and scoring ----


class Diagnosis:
    """Grows and scores trajectories on a running engine; construct it in the event loop that will use it."""

    def __init__(self, plan: ExplorationPlan, engine: RolloutEngine):
        self.engine, self.plan = engine, plan
        self.bar = tqdm(total=len(plan.policies) * len(plan.prompts), unit="prompt")
        self.environment = environment_of(plan.config, plan.tokenizer)
        self.rewards = RewardLoopWorker(plan.config)

    async def ct_build_initial_tokens(self, messages, tools=None) -> list[int]:
        """Return a prompt's tokens, which a rollout asks of upstream's agent loop by this name."""
        return prompt_ids(self.plan.tokenizer, messages, self.plan.config.data, tools)

    async def aclose(self) -> None:
        self.bar.close()
        await self.environment.stop()

    async def groups_of(self, name: str, config: DictConfig) -> tuple[list[SampledGroup], float]:
        """Return the groups of all prompts, and the seconds that growing them took."""
        self.bar.set_description(name)
        rollout = TreeRollout(config, cast(Any, self), self.engine, self.plan.tokenizer, self.environment)
        rollout.compute_score = self._compute_score
        if isinstance(self.engine, VLLMEngine):
            await self.engine.forget_prefixes()
        started = time.perf_counter()
        grown = await gather_or_cancel(*(self._grow(prompt, rollout) for prompt in self.plan.prompts))
        seconds = time.perf_counter() - started
        return [await self._group(rollout, *each) for each in grown], seconds

    async def _grow(self, prompt: Prompt, rollout: TreeRollout) -> tuple:
        recorder, task, keys = Recorder(self.engine), PromptTask.of_row(prompt.about), rollout.config.actor_rollout_ref
        sampling = {name: keys.rollout[name] for name in ("temperature", "top_p", "top_k")}
        async with self.environment.opened(task.row, rollout.seed_of(task)) as environment:
            tree, policy = await rollout.grow_tree(environment, task, keys.rollout.n, sampling, recorder)
        self.bar.update()
        return prompt, tree, policy, recorder

    async def _group(
        self, rollout: TreeRollout, prompt: Prompt, tree: TrajectoryTree, policy, recorder
    ) -> SampledGroup:
        rows = zip(rows_of(tree, policy), tree.leaves, strict=True)
        kept, trajectories = [row for row, leaf in rows if not tree.is_dropped(leaf)], []
        if tree.turn_rewards:
            scores: list[dict[str, Any]] = [{"reward_score": row.reward_score} for row in kept]
        else:
            scores = await self.rewards.compute_score_batch(reward_batch(kept, prompt.about))
        for row, score in zip(kept, scores, strict=True):
            extra, tokens = score.get("reward_extra_info") or {}, row.response_ids
            right = float(extra.get("acc", score["reward_score"])) > self.plan.config.verification_threshold
            answer = extra.get("pred", self.plan.tokenizer.decode(tokens, skip_special_tokens=True))
            steps = recorder.steps_of(tree.prompt_ids, tokens, row.response_mask)
            trajectories.append(Trajectory(tokens, steps, right, str(answer)))
        limit = rollout.response_tokens(len(tree.prompt_ids))
        return SampledGroup(tree.prompt_ids, trajectories, recorder.tokens, tree.metrics, limit)

    async def _compute_score(self, outputs: Sequence[AgentLoopOutput], row: dict[str, Any]) -> None:
        scores = await self.rewards.compute_score_batch(reward_batch(outputs, row))
        outputs[-1].reward_score = scores[-1]["reward_score"]


async def diagnose(plan: ExplorationPlan, engine: RolloutEngine) -> dict[str, Any]:
    """Run a diagnosis and return its results in JSON's types: `rows`, each with `policy`, the numbers of
    `measure_groups` and `seconds`; `proposals`, each with `policy`, `overrides` and the `expected` effect; and
    `solve_rates`, a pair (row number, share of right plain samples at the run's own temperature) for each prompt."""
    n, rows, proposals, plain = plan.config.n, [], [], {}
    async with aclosing(Diagnosis(plan, engine)) as diagnosis:
        # One-time costs of the engine would else count as the first policy's time.
        await Recorder(engine).generate(GenerationRequest(plan.prompts[0].ids, 2, (), seed=0))
        for name, config in plan.policies.items():
            groups, seconds = await diagnosis.groups_of(name, config)
            rows.append({"policy": name, **measure_groups(groups, n), "seconds": seconds})
            if config.actor_rollout_ref.rollout.tree == "plain":
                plain[config.actor_rollout_ref.rollout.temperature] = groups
    usual = plan.config.actor_rollout_ref.rollout.temperature
    samples = plain[min(plain, key=lambda temperature: abs(temperature - usual))]
    for tree, propose in parts("proposal").items():
        # for the first policy that grows this kind of tree
        config = next((each for each in plan.policies.values() if each.actor_rollout_ref.rollout.tree == tree), None)
        if config is None:
            continue
        proposal = propose(Samples(n, config.actor_rollout_ref.rollout, plain[min(plain)], samples))
        if proposal is not None:
            proposals.append({"policy": tree, "overrides": proposal.line(), "expected": proposal.expected})
    solve_rates = [
        (prompt.number, fmean(trajectory.right for trajectory in group.trajectories))
        for prompt, group in zip(plan.prompts, samples, strict=True)
    ]
    return {"rows": rows, "proposals": proposals, "solve_rates": solve_rates}


def run(plan: ExplorationPlan) -> dict[str, Any]:
    """Start the engine, grow and measure everything, stop the engine; return the results of `diagnose`."""
    with running_engine(plan) as engine:
        return asyncio.run(diagnose(plan, engine))
