"""Runs one coroutine per prompt group, which makes all trajectories of a prompt together.

    trainer ── prompts ──> GroupAgentLoopManager ──> GroupAgentLoopWorker._run_prompt
                                                          │ one TreeRollout.run per prompt; in validation, and with
                                                          │ `rollout.tree=null`, without branches
                                                          └─> one call to score the group, one to write its rows

A group that raises, or takes longer than `rollout.group_timeout` seconds in all, fails alone (upstream's status
`failure`); the other groups continue. The worker counts the groups and keeps the first failure's cause
(`group_counts`).

Without a tree, and in validation without tools, upstream's code runs some prompts, trajectory by trajectory: prompts
whose row or config names another agent loop than upstream's single-turn one, and all prompts if `plain_suffices` is
false.
"""

import asyncio
import logging
import random
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

import ray
import transfer_queue as tq
from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import DictConfigWrap, ToolListWrap, _agent_loop_registry
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ, apply_greedy_sampling_params

from verl.utils.fault_reports import RunError, cause_of, report_fault
from verl.utils.parts import tree_of_rollout_name
from verl.utils.user_code import finite_number, guard_tasks, guarded
from verl.workers.config.explore import parts_of
from verl.workers.config.sampler_choice import SEEDS
from verl.workers.rollout.engines.vllm_server import LLMClientEngine
from verl.workers.rollout.group_counts import GroupCounts
from verl.workers.rollout.prompt_task import PromptTask
from verl.workers.rollout.rows import Entries, QueueWriter, queue_rows, reward_batch
from verl.workers.rollout.tree_rollout import TrajectoryOutput, TreeRollout

logger = logging.getLogger(__name__)

SCORED_TOGETHER = 16  # number of a group's trajectories that one reward worker scores; others go to other workers
GIVE_UP_SECONDS = 10  # longest wait for a cancelled group to end
COUNTS_SECONDS = 30  # longest wait for the workers' counts
STOP_SECONDS = 30  # longest wait for the workers' end
SINGLE_TURN = "single_turn_agent"  # upstream's name for the agent loop of prompts without `agent_name`

# the undecorated class of upstream's worker, which is a Ray actor class
_AgentLoopWorker = AgentLoopWorkerTQ.__ray_metadata__.modified_class.__ray_actor_class__


@ray.remote
class GroupAgentLoopWorker(_AgentLoopWorker):
    """Upstream's agent-loop worker, but with one coroutine for each prompt group; it counts the groups."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        seeds = OmegaConf.select(self.config, SEEDS, default=True)
        self.engine = LLMClientEngine(self.llm_client, self.tokenizer.decode, seeds)
        self.stopping = False
        # the counts by partition, `train` or `val`
        self.counts: defaultdict[str, GroupCounts] = defaultdict(GroupCounts)
        self.queue = {partition: QueueWriter(partition) for partition in ("train", "val")}
        self.session_errors: dict[str, Exception] = {}  # uid of a prompt -> first error
        self.lost_statuses = False
        self.has_tree = parts_of(self.config.actor_rollout_ref.rollout).tree is not None
        self.plain_suffices = plain_suffices(self.config, self.processor)
        self.tree_rollout = self._tree_rollout() if self.has_tree or self.plain_suffices else None

    async def group_counts(self, partition: str, take: bool) -> GroupCounts:
        """Return the counts of a partition's groups; `take` resets them."""
        return self.counts.pop(partition, GroupCounts()) if take else self.counts[partition]

    async def stop(self) -> None:
        """Cancel all unfinished groups, because the run has ended, and close what they shared, such as tools."""
        self.stopping, tasks = True, list(self.background_tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.tree_rollout is not None:
            await self.tree_rollout.environment.stop()

    def _tree_rollout(self) -> TreeRollout:
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
        tree_rollout = TreeRollout(self.config, agent_loop, self.engine, self.tokenizer)
        if self.reward_loop_worker_handles is not None:
            tree_rollout.compute_score = self._compute_score
        return tree_rollout

    async def _run_prompt(self, prompt: dict, sampling_params: dict, trajectory: dict, trace: bool = False) -> None:
        """Run a prompt and publish its final status. Nobody awaits this task, so the run would wait forever for a
        missing status. Therefore an exception here, such as one of TransferQueue's or a cancellation, ends the run.
        """
        uid, partition = prompt["uid"], "val" if trajectory["validate"] else "train"
        guard_tasks(asyncio.get_running_loop())
        try:
            task = PromptTask.of_row(prompt)
            sampling_params = with_settings(sampling_params, task.settings.sampler, partition)
            if not self._runs_as_group(prompt, trajectory["validate"]):
                await super()._run_prompt(dict(task.row), sampling_params, trajectory, trace)
                self.counts[partition].add(self.session_errors.pop(uid, None))
                return
            await self.queue[partition].put(Entries([uid], [{"status": "running"}]))
            status = await self._group_status(task, sampling_params, trajectory["validate"])
            if status == "failure":
                await self._drop_rows(uid, partition)
            await self.queue[partition].put(Entries([uid], [{"status": status}]))
        except BaseException as error:
            if self.stopping:
                raise
            logger.exception(f"the status of prompt {uid} is lost")
            if self.lost_statuses:  # one report ends the run
                return
            self.lost_statuses = True
            report_fault(f"a rollout worker could not say what became of prompt {uid}: {cause_of(error)}")

    async def _group_status(self, task: PromptTask, sampling_params: dict, validate: bool) -> str:
        """Run a group; return `finished`, or `failure` if it raised or took too long."""
        partition = "val" if validate else "train"
        seconds = self.config.actor_rollout_ref.rollout.get("group_timeout")
        group = asyncio.ensure_future(guarded(self._run_group(task, dict(sampling_params), validate), "the rollout"))
        try:
            in_time, _ = await asyncio.wait({group}, timeout=seconds)
        finally:
            if not group.done():  # this task is cancelled, or the time is over
                group.cancel()
                await asyncio.wait({group}, timeout=GIVE_UP_SECONDS)
        try:
            if not in_time:
                raise TimeoutError(f"the group ended after rollout.group_timeout={seconds} s")
            group.result()
        except (Exception, asyncio.CancelledError) as error:
            if self.stopping:
                raise
            logger.exception(f"group rollout of prompt {task.row['uid']} failed")
            self.counts[partition].add(error)
            if isinstance(error, RunError):  # the other groups' fault, too
                report_fault(str(error))
            return "failure"
        self.counts[partition].add()
        return "finished"

    async def _run_agent_loop(self, *args, **kwargs):
        """Run one trajectory with upstream's code, and keep the first error of its prompt."""
        try:
            return await guarded(super()._run_agent_loop(*args, **kwargs), "the agent loop")
        except Exception as error:
            self.session_errors.setdefault(kwargs["uid"], error)
            raise

    def _runs_as_group(self, prompt: dict, validate: bool) -> bool:
        by_tree = self.has_tree and (not validate or self.tree_rollout.validates)
        return by_tree or self.plain_suffices and str(prompt["agent_name"]) == SINGLE_TURN

    async def _drop_rows(self, uid: str, partition: str) -> None:
        """Remove rows that a failed group has already written, so that no incomplete group is trained on."""
        written = (await tq.async_kv_list(partition_id=partition) or {}).get(partition, {})
        if rows := [key for key in written if key.startswith(f"{uid}_")]:
            await tq.async_kv_clear(keys=rows, partition_id=partition)

    async def _run_group(self, task: PromptTask, sampling_params: dict, validate: bool) -> None:
        config = self.config.actor_rollout_ref.rollout
        greedy = not task.row.get("__do_sample__", True) and not validate
        if greedy:
            apply_greedy_sampling_params(sampling_params)
        n = task.row.get("__rollout_n__", config.val_kwargs.n if validate else config.n)
        for_upstream = ("__do_sample__", "__rollout_n__", "agent_name")
        prompt = {name: value for name, value in task.row.items() if name not in for_upstream}
        try:
            outputs = await self.tree_rollout.run(replace(task, row=prompt), n, sampling_params, validate or greedy)
        finally:
            self.engine.release(prompt["uid"])
        if not 1 <= len(outputs) <= n:
            raise RuntimeError(f"{type(self.tree_rollout.policy)} made {len(outputs)} trajectories, expected 1 to {n}")
        if not self.has_tree and not config.calculate_log_probs:
            for output in outputs:
                output.response_logprobs = None
        if self.distillation_enabled or self.processor is not None:
            await self._put_sessions(outputs, prompt, validate)
        else:
            await self._put_group(outputs, prompt, validate)

    async def _put_group(self, outputs: list[TrajectoryOutput], prompt: dict, validate: bool) -> None:
        """Score all trajectories together, then write their rows."""
        if self.reward_loop_worker_handles is not None:
            await self._score_group(outputs, prompt)
        await self.queue["val" if validate else "train"].put(queue_rows(outputs, prompt))

    async def _score_group(self, outputs: list[TrajectoryOutput], prompt: dict) -> None:
        """Score the trajectories that have an answer, which come first; the others already have a reward."""
        outputs = [output for output in outputs if output.reward_score is None]
        started = time.perf_counter()
        calls = []
        for first in range(0, len(outputs), SCORED_TOGETHER):
            batch = reward_batch(outputs[first : first + SCORED_TOGETHER], prompt, first)
            calls.append(random.choice(self.reward_loop_worker_handles).compute_score_batch.remote(batch))
        results = [result for call in await asyncio.gather(*calls) for result in call]
        for output, result in zip(outputs, results, strict=True):
            output.reward_score = finite_number(result["reward_score"], "the reward")
            output.extra_fields["reward_extra_info"] = result.get("reward_extra_info", {})
            output.metrics.compute_score = time.perf_counter() - started

    async def _put_sessions(self, outputs: list[TrajectoryOutput], prompt: dict, validate: bool) -> None:
        """Write the rows with upstream's code for single trajectories, which handles teachers and images."""
        puts = [
            asyncio.create_task(self._agent_loop_postprocess(output, validate, session_id=session, **prompt))
            for session, output in enumerate(outputs)
        ]
        # Await all of them before the group's status is set: no row may be written after its group has failed.
        await asyncio.gather(*puts, return_exceptions=True)
        for put in puts:
            put.result()


def with_settings(sampling_params: dict, settings: Mapping | None, partition: str) -> dict:
    """Return the sampling parameters, for training prompts with `settings` added to vLLM's `extra_args`."""
    if settings is None or partition == "val":
        return sampling_params
    extra_args = {**(sampling_params.get("extra_args") or {}), **settings}
    return {**sampling_params, "extra_args": extra_args}


def plain_suffices(config, processor) -> bool:
    """Return whether n independent text samples equal the results of upstream's single-turn agent loop: without images,
    another class of that name, and keys that only upstream's client implements."""
    rollout = config.actor_rollout_ref.rollout
    only_upstreams = ("full_determinism", "ignore_eos", "enable_rollout_routing_replay", "trace.backend")
    mtp = OmegaConf.select(config, "actor_rollout_ref.model.mtp.enable")
    registered = _agent_loop_registry[SINGLE_TURN]["_target_"]
    return (
        processor is None
        and not mtp
        and rollout.name in ("vllm", *tree_of_rollout_name())
        and not any(OmegaConf.select(rollout, key) for key in only_upstreams)
        and registered == f"{SingleTurnAgentLoop.__module__}.{SingleTurnAgentLoop.__qualname__}"
    )


class GroupAgentLoopManager(AgentLoopManagerTQ):
    """The `actor_rollout_ref.rollout.agent.agent_loop_manager_class` of every recipe."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = GroupAgentLoopWorker
        self._turn = 0

    def generate_sequences(self, prompts) -> None:
        """Send prompts like upstream, but start with the worker after the last one used, to spread single prompts."""
        workers = self.agent_loop_workers[self._turn :] + self.agent_loop_workers[: self._turn]
        chunks = prompts.chunk(len(workers))
        self._turn = (self._turn + len(chunks)) % len(workers)
        ray.get([worker.generate_sequences.remote(chunk) for worker, chunk in zip(workers, chunks, strict=False)])

    def group_counts(self, partition: str, take: bool) -> GroupCounts:
        """Return the sum of all workers' group counts; `take` resets them."""
        calls = [worker.group_counts.remote(partition, take) for worker in self.agent_loop_workers]
        return sum(ray.get(calls, timeout=COUNTS_SECONDS), GroupCounts())

    def stop(self) -> None:
        calls = [worker.stop.remote() for worker in self.agent_loop_workers]
        ray.wait(calls, num_returns=len(calls), timeout=STOP_SECONDS)  # the run has ended, whatever becomes of them
