"""One coroutine per prompt group: the n trajectories of a prompt are made together.

    trainer ── prompts ──> GroupAgentLoopManager ──> GroupAgentLoopWorker._run_prompt
                                                          │ training: one GroupRollout.run per prompt
                                                          │ validation: upstream's n independent agent loops
                                                          └─> score, TransferQueue, status: upstream's

A group that raises, or takes longer than `rollout.group_timeout` seconds, is that group's failure (upstream's status
`failure`); the others go on. A method subclasses `GroupRollout` and registers under its rollout name, or its rollout
mode; what has none runs as upstream.
"""

import asyncio
import importlib
import logging
import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import ray
import transfer_queue as tq
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, DictConfigWrap, ToolListWrap
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ, apply_greedy_sampling_params

from verl.workers.rollout.llm_client_engine import LLMClientEngine
from verl.workers.rollout.rollout_engine import Generation, RolloutEngine, end_of_sequence_ids, generation_config_of
from verl.workers.rollout.trajectory_tree import (
    ADAPTIVE_TEMPERATURE,
    OCCURRENCE,
    TREE,
    TREE_METRICS,
    TrajectoryTree,
    writes_trees,
)

logger = logging.getLogger(__name__)

GROUP_ROLLOUTS = {
    "kt": "verl.workers.rollout.kt_rollout.KTRollout",
    "hato": "verl.workers.rollout.hato_rollout.HATORollout",
    "over_generation": "verl.workers.rollout.trees.over_generation.OverGeneration",
    "sync_with_tool": "verl.workers.rollout.tool_rollout.ToolRollout",
}

# upstream decorates its worker; this is the class before that
_AgentLoopWorker = AgentLoopWorkerTQ.__ray_metadata__.modified_class.__ray_actor_class__


class GroupRollout(ABC):
    """Makes all trajectories of one prompt. One instance per worker; `run` is called for many prompts at once.

    Args:
        config: the whole config of the run.
        agent_loop: upstream's single-turn agent loop: how a prompt becomes token ids, and one plain trajectory.
        engine: where tokens come from.
        tokenizer: the model's.
    """

    def __init__(self, config, agent_loop: SingleTurnAgentLoop, engine: RolloutEngine, tokenizer):
        self.config, self.agent_loop, self.engine, self.tokenizer = config, agent_loop, engine, tokenizer
        self.stop_token_ids = end_of_sequence_ids(tokenizer, generation_config_of(tokenizer.name_or_path))

    # what validation does, with the arguments of `run`; None: upstream's n independent agent loops
    validate: Callable | None = None
    # upstream's `_compute_score(outputs, kwargs)`, which sets reward_score and reward_extra_info of the last output; an
    # output that has a score is not scored again. None: rewards are not computed during the rollout
    compute_score: Callable | None = None

    @abstractmethod
    async def run(self, prompt: dict[str, Any], n: int, sampling_params: dict[str, Any]) -> list[AgentLoopOutput]:
        """The n trajectories of a prompt.

        Args:
            prompt: the row of the data set (`raw_prompt`, `index`, …) with `uid` and `global_steps`.
            n: how many trajectories.
            sampling_params: temperature, top_p, top_k, … of ordinary sampling.

        Requests to the engine have the prompt's `uid` as their `request_id`: they go to one server, which is given
        back when this has ended.

        Returns:
            n outputs in session order.
        """

    async def prompt_ids(self, prompt: dict[str, Any]) -> list[int]:
        """Token ids as upstream's agent loop makes them."""
        return list(await self.agent_loop.ct_build_initial_tokens(list(prompt["raw_prompt"])))

    def seed_of(self, prompt: dict[str, Any]) -> int:
        """Depends on the run's seed, the training step, the row (its `index`, which may be missing, and its text), and
        how often the step has had this row before."""
        seed = self.config.actor_rollout_ref.rollout.seed
        row = f"{prompt.get('index')} {list(prompt.get('raw_prompt', ()))}"
        again = int(prompt.get(OCCURRENCE, 0))
        return random.Random(f"{seed} {prompt.get('global_steps')} {row}{f' {again}' if again else ''}").getrandbits(31)

    def room(self, prompt_tokens: int) -> int:
        """Tokens that a response may have, as upstream's server counts them."""
        rollout = self.config.actor_rollout_ref.rollout
        context = rollout.get("max_model_len") or rollout.prompt_length + rollout.response_length
        room = min(rollout.response_length, context - prompt_tokens)
        if room < 1:
            raise ValueError(f"a prompt of {prompt_tokens} tokens leaves no room in a context of {context}")
        return room

    def about_group(self, tree: TrajectoryTree, prompt: dict[str, Any], tokens_generated: int) -> dict[str, Any]:
        """Extra fields of the first session: metrics, and the tree in the steps in which the trainer writes it down."""
        tree.metrics |= {"tokens_generated": float(tokens_generated)}
        if writes_trees(self.config, int(prompt["global_steps"])):
            return {TREE_METRICS: tree.metrics, TREE: tree.to_json()}
        return {TREE_METRICS: tree.metrics}


class VersionRecorder:
    """A group's engine: it counts the tokens it made, remembers their weights' versions, and passes the sampler's
    settings of the group's prompt on with every request.

    Args:
        sampling_params: of the group; its `extra_args`, if any, go with every request.
    """

    def __init__(self, engine: RolloutEngine, sampling_params: dict[str, Any] | None = None):
        self.engine, self.seen, self.tokens = engine, [], 0
        extra_args = (sampling_params or {}).get("extra_args")
        self.extra = {"extra_args": extra_args} if extra_args else {}

    async def generate(self, prompt_ids, **options) -> Generation:
        generation = await self.engine.generate(prompt_ids, **options, **self.extra)
        self.seen += generation.info.values()
        self.tokens += len(generation.token_ids)
        return generation

    def versions(self) -> dict[str, int]:
        """Upstream's fields for staleness control; empty for an engine without versions."""
        return {"min_global_steps": min(self.seen), "max_global_steps": max(self.seen)} if self.seen else {}


def group_rollout_class(rollout_name: str, mode: str = "async") -> type[GroupRollout] | None:
    """The group rollout registered under a rollout name or mode; None: upstream's agent loops."""
    path = GROUP_ROLLOUTS.get(rollout_name) or GROUP_ROLLOUTS.get(mode)
    if path is None:
        return None
    module, name = path.rsplit(".", 1)
    return getattr(importlib.import_module(module), name)


@ray.remote
class GroupAgentLoopWorker(_AgentLoopWorker):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        rollout = self.config.actor_rollout_ref.rollout
        cls = group_rollout_class(rollout.name, rollout.mode)
        self.engine = LLMClientEngine(self.llm_client)
        self.group_rollout = self._make(cls) if cls is not None else None

    def _make(self, cls: type[GroupRollout]) -> GroupRollout:
        agent_loop = SingleTurnAgentLoop(
            trainer_config=DictConfigWrap(config=self.config),
            server_manager=self.llm_client,
            tokenizer=self.tokenizer,
            processor=self.processor,
            hf_model_type=self.hf_model_type,
            dataset_cls=self.dataset_cls,
            data_config=DictConfigWrap(self.config.data),
            tools=ToolListWrap(self.tools),
        )
        group_rollout = cls(self.config, agent_loop, self.engine, self.tokenizer)
        if self.reward_loop_worker_handles is not None:
            group_rollout.compute_score = self._compute_score
        return group_rollout

    async def _run_prompt(self, prompt: dict, sampling_params: dict, trajectory: dict, trace: bool = False) -> None:
        validate, make = trajectory["validate"], None
        settings = prompt.pop(ADAPTIVE_TEMPERATURE, None)
        if settings is not None and not validate:
            extra_args = {**(sampling_params.get("extra_args") or {}), ADAPTIVE_TEMPERATURE: settings}
            sampling_params = {**sampling_params, "extra_args": extra_args}
        if self.group_rollout is not None:
            plain = validate or not prompt.get("__do_sample__", True)
            make = self.group_rollout.validate if plain else self.group_rollout.run
        if make is None:
            await super()._run_prompt(prompt, sampling_params, trajectory, trace)
            return
        uid, partition = prompt["uid"], "val" if validate else "train"
        await tq.async_kv_put(key=uid, partition_id=partition, tag={"status": "running"})
        try:
            seconds = self.config.actor_rollout_ref.rollout.get("group_timeout")
            await asyncio.wait_for(self._run_group(make, prompt, dict(sampling_params), validate), seconds)
            status = "finished"
        except asyncio.TimeoutError:
            logger.error(f"group rollout of prompt {uid} ended after rollout.group_timeout={seconds} s")
            status = "failure"
        except Exception:
            logger.exception(f"group rollout of prompt {uid} failed")
            status = "failure"
        if status == "failure":
            await self._drop_rows(uid, partition)
        await tq.async_kv_put(key=uid, partition_id=partition, tag={"status": status})

    async def _drop_rows(self, uid: str, partition: str) -> None:
        """Sessions of a failed group that were written before it failed: half a group is none."""
        known = (await tq.async_kv_list(partition_id=partition) or {}).get(partition, {})
        rows = [key for key in known if key.startswith(f"{uid}_")]
        if rows:
            await tq.async_kv_clear(keys=rows, partition_id=partition)

    async def _run_group(self, make: Callable, prompt: dict, sampling_params: dict, validate: bool) -> None:
        config = self.config.actor_rollout_ref.rollout
        if not prompt.get("__do_sample__", True) and not validate:
            apply_greedy_sampling_params(sampling_params)
        prompt = {name: value for name, value in prompt.items() if name not in ("__do_sample__", "agent_name")}
        n = prompt.pop("__rollout_n__", config.val_kwargs.n if validate else config.n)
        try:
            outputs = await make(prompt, n, sampling_params)
        finally:
            self.engine.release(prompt["uid"])
        if len(outputs) != n:
            raise RuntimeError(f"{type(self.group_rollout).__name__} returned {len(outputs)} trajectories, not {n}")
        puts = [
            asyncio.create_task(self._agent_loop_postprocess(output, validate, session_id=session, **prompt))
            for session, output in enumerate(outputs)
        ]
        # all settle before the status is known: no session may be written after its group was given up
        results = await asyncio.gather(*puts, return_exceptions=True)
        for error in results:
            if isinstance(error, BaseException):
                raise error


class GroupAgentLoopManager(AgentLoopManagerTQ):
    """actor_rollout_ref.rollout.agent.agent_loop_manager_class of every recipe with group rollouts."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = GroupAgentLoopWorker
        self._turn = 0

    def generate_sequences(self, prompts) -> None:
        """Upstream's, but for the worker that begins: where prompts come one by one, each worker has its turn."""
        workers = self.agent_loop_workers[self._turn :] + self.agent_loop_workers[: self._turn]
        chunks = prompts.chunk(len(workers))
        self._turn = (self._turn + len(chunks)) % len(workers)
        ray.get([worker.generate_sequences.remote(chunk) for worker, chunk in zip(workers, chunks, strict=False)])
