"""Tests of a group's rollout: its status, its rows, its seeds.

The queue and the scorer are stand-ins here; the whole path on the real stack is in tests/e2e.
"""

import asyncio
import math
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest
from omegaconf import DictConfig, OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics

from recipe.latr.over_generation import most_diverse
from tests.tables import table
from tests.workers.rollout.group_worker import make_worker
from verl.utils.fault_reports import RunError
from verl.workers.rollout import group_rollout
from verl.workers.rollout.group_counts import GroupCounts
from verl.workers.rollout.group_rollout import plain_suffices
from verl.workers.rollout.prompt_task import PROMPT_SETTINGS, STEP_SETTINGS, PromptSettings, PromptTask
from verl.workers.rollout.tree_rollout import TrajectoryOutput, TreeRollout


class Engine:
    def __init__(self):
        self.released = []

    def release(self, uid: str) -> None:
        self.released.append(uid)


ERRORS = {
    "raises": ValueError("no such token"),
    "exits": SystemExit(3),
    "times out": asyncio.TimeoutError("the judge gave no answer"),
    "cancels itself": asyncio.CancelledError(),
    "engine": RunError("the engine's log-probabilities are NaN"),
}


class Rollout:
    validates = False

    def __init__(self):
        self.policy, self.asked = None, []

    async def run(self, task, n, sampling_params, plain):
        prompt = task.row
        self.asked.append((prompt["uid"], n, sampling_params, plain))
        await asyncio.sleep(0)
        if prompt["uid"] in ERRORS:
            raise ERRORS[prompt["uid"]]
        if prompt["uid"] == "exits in a task":
            await asyncio.gather(asyncio.create_task(exits()), asyncio.sleep(60))
        if prompt["uid"].endswith("stuck"):
            await asyncio.sleep(60)
        rows = {"too many": n + 1, "no rows": 0, "fewer": n - 1}.get(prompt["uid"], n)
        return [trajectory(i) for i in range(rows)]


def trajectory(i: int) -> TrajectoryOutput:
    tokens = list(range(5, 7 + i))
    return TrajectoryOutput(
        prompt_ids=[1, 2, 3],
        response_ids=tokens,
        response_mask=[1] * len(tokens),
        response_logprobs=[-0.5] * len(tokens),
        num_turns=2,
        metrics=AgentLoopMetrics(generate_sequences=1.0),
        extra_fields={"turn_scores": [], "tool_rewards": [], "min_global_steps": 3, "max_global_steps": 4},
        token_fields={"segment_ids": [i] * len(tokens)},
    )


async def exits():
    raise SystemExit(3)


NO_REWARDS = {"nan": math.nan, "none": None, "text": "1.0"}


class Scorer:
    """A reward worker's handle; scores by the response's length and remembers how many rows came at once."""

    def __init__(self):
        self.compute_score_batch, self.sizes = SimpleNamespace(remote=self._score), []

    async def _score(self, data):
        self.sizes.append(len(data))
        if data.non_tensor_batch["uid"][0] == "unscored":
            raise RuntimeError("the reward function failed")
        if data.non_tensor_batch["uid"][0] in NO_REWARDS:
            return [{"reward_score": NO_REWARDS[data.non_tensor_batch["uid"][0]]}] * len(data)
        lengths = data.batch["attention_mask"].sum(-1) - data.batch["prompts"].shape[1]
        return [{"reward_score": float(n), "reward_extra_info": {"acc": bool(n > 2)}} for n in lengths]


SETTINGS = ["n=3", "group_timeout=0.5", "val_kwargs.n=2", "calculate_log_probs=true"]


@pytest.fixture
def queue(monkeypatch, model_folder):
    """A worker, (uid, status) in the order in which they were published, and its rows (uid, session, their prompt)."""
    published, put = [], []

    async def async_kv_batch_put(keys, tags, partition_id, fields):
        assert partition_id in ("train", "val")
        await asyncio.sleep(0.01)
        if fields is None:
            published.extend((key, tag["status"]) for key, tag in zip(keys, tags, strict=True))
            return
        for key, tag in zip(keys, tags, strict=True):
            put.append((*key.split("_")[:2], {"__do_sample__", "__rollout_n__", "agent_name"} & set(fields.keys())))
            assert tag["status"] == "success" and "rm_scores" in fields.keys()

    async def async_kv_list(partition_id):
        return {partition_id: {f"{uid}_{session}_0": {} for uid, session, _ in put}}

    async def async_kv_clear(keys, partition_id):
        put[:] = [row for row in put if f"{row[0]}_{row[1]}_0" not in keys]

    for name, function in dict(locals()).items():
        if name.startswith("async_kv"):
            monkeypatch.setattr(group_rollout.tq, name, function)
    settings = (f"actor_rollout_ref.rollout.{setting}" for setting in SETTINGS)
    worker = make_worker(monkeypatch, model_folder, [Scorer()], *settings)
    worker.tree_rollout, worker.has_tree, worker.plain_suffices, worker.engine = Rollout(), True, True, Engine()
    return worker, published, put


def run(worker, uids, validate=False, **more):
    async def groups():
        about = {"agent_name": "single_turn_agent", "global_steps": 1}
        prompts = [{"uid": uid, **about, **more} for uid in uids]
        await asyncio.gather(*(worker._run_prompt(prompt, {}, {"validate": validate}) for prompt in prompts))

    asyncio.run(groups())


def test_a_failing_group_fails_alone(queue):
    worker, published, put = queue
    uids = ["raises", "fine", "too many", "no rows", "stuck", "fewer", "exits", "exits in a task", "times out"]
    uids += ["cancels itself", *NO_REWARDS]
    run(worker, uids)
    assert dict(published) == dict.fromkeys(uids, "failure") | {"fine": "finished", "fewer": "finished"}
    assert sorted((uid, session) for uid, session, _ in put) == [
        *(("fewer", session) for session in "01"),
        *(("fine", session) for session in "012"),
    ]
    assert sorted(worker.engine.released) == sorted(uids), "every group gives its server back"
    counts = asyncio.run(worker.group_counts("train", take=True))
    assert (counts.finished, counts.failed) == (2, len(uids) - 2)
    assert counts.first_failure == "ValueError: no such token"
    assert asyncio.run(worker.group_counts("train", take=False)) == GroupCounts()


@pytest.mark.parametrize(
    "uid, cause",
    [
        ("exits in a task", "UserCodeExit: a task raised SystemExit(3)"),
        ("times out", "TimeoutError: the judge gave no answer"),
        ("stuck", "TimeoutError: the group ended after rollout.group_timeout=0.5 s"),
        *((uid, f"ValueError: the reward is {it!r}, expected a finite number") for uid, it in NO_REWARDS.items()),
    ],
)
def test_the_cause_of_a_failure_is_its_own(queue, uid, cause):
    worker, *_ = queue
    run(worker, [uid])
    assert asyncio.run(worker.group_counts("train", take=True)).first_failure == cause


def test_an_engine_that_computes_nan_ends_the_run(queue, monkeypatch):
    """The run ends at once: a replica that fails its groups first would get all others."""
    worker, published, *_ = queue
    reports = []
    monkeypatch.setattr(group_rollout, "report_fault", reports.append)
    run(worker, ["fine", "engine"])
    assert reports == ["the engine's log-probabilities are NaN"] and dict(published)["engine"] == "failure"


def test_a_session_of_upstreams_agent_loops_that_failed_is_counted(queue, monkeypatch):
    worker, *_ = queue

    async def session(self, *args, uid, **kwargs):
        if uid == "raises":
            raise SystemExit(3)

    async def sessions(self, prompt, params, trajectory, trace):
        await asyncio.gather(self._run_agent_loop(uid=prompt["uid"]), return_exceptions=True)

    monkeypatch.setattr(group_rollout._AgentLoopWorker, "_run_agent_loop", session)
    monkeypatch.setattr(group_rollout._AgentLoopWorker, "_run_prompt", sessions)
    worker.has_tree, worker.plain_suffices = False, False
    run(worker, ["raises", "fine"])
    counts = asyncio.run(worker.group_counts("train", take=False))
    assert (counts.finished, counts.failed) == (1, 1)
    assert counts.first_failure == "UserCodeExit: the agent loop raised SystemExit(3)"


async def test_groups_that_are_given_up_at_the_end_of_a_run_are_no_failures(queue):
    worker, published, *_ = queue
    worker.config.actor_rollout_ref.rollout.group_timeout = None
    worker.tree_rollout.environment = SimpleNamespace(stop=AsyncMock())
    prompt = {"uid": "stuck", "agent_name": "single_turn_agent", "global_steps": 1}
    task = asyncio.ensure_future(worker._run_prompt(prompt, {}, {"validate": False}))
    worker.background_tasks = {task}
    await asyncio.sleep(0.05)
    await worker.stop()
    assert task.cancelled()
    worker.tree_rollout.environment.stop.assert_awaited_once()
    assert published == [("stuck", "running")] and worker.engine.released == ["stuck"]


@pytest.mark.parametrize(
    "error", [ConnectionError("gone"), asyncio.CancelledError(), SystemExit(0), KeyboardInterrupt()], ids=repr
)
def test_a_status_that_is_lost_ends_the_run(queue, monkeypatch, error):
    """Nobody awaits the prompt's task, and the trainer would wait for its status forever."""

    async def put(**kwargs):
        raise error

    reports, (worker, *_) = [], queue
    monkeypatch.setattr(group_rollout.tq, "async_kv_batch_put", put)
    monkeypatch.setattr(group_rollout, "report_fault", reports.append)
    run(worker, ["good", "other"])
    (report,) = reports
    assert report.startswith("a rollout worker could not say what became of prompt good: " + type(error).__name__)


def test_a_groups_status_comes_after_its_last_session(queue):
    worker, published, put = queue
    run(worker, ["unscored"])
    assert published == [("unscored", "running"), ("unscored", "failure")]
    assert put == [], "half a group is none"


def test_validation_and_greedy_groups_do_not_branch(queue):
    worker, published, put = queue
    worker.tree_rollout.validates = True
    run(worker, ["sampled"])
    run(worker, ["greedy"], __do_sample__=False, __rollout_n__=1)
    run(worker, ["validated"], validate=True)
    groups = {uid: (n, params.get("temperature"), plain) for uid, n, params, plain in worker.tree_rollout.asked}
    assert groups == {"sampled": (3, None, False), "greedy": (1, 0.0, True), "validated": (2, None, True)}
    assert {status for _, status in published} == {"running", "finished"} and len(put) == 6
    assert not any(settings for _, _, settings in put), "the trainer's settings of a prompt are no columns"


@pytest.mark.parametrize("has_tree", [True, False])
@pytest.mark.parametrize("plain_suffices", [True, False])
@pytest.mark.parametrize("environment", [True, False])
def test_upstreams_agent_loops_run_all_other_prompts(queue, monkeypatch, has_tree, plain_suffices, environment):
    worker, published, *_ = queue
    upstreams = []

    async def upstream(self, prompt, *args):
        upstreams.append(prompt["uid"])

    monkeypatch.setattr(group_rollout._AgentLoopWorker, "_run_prompt", upstream)
    worker.has_tree, worker.plain_suffices, worker.tree_rollout.validates = has_tree, plain_suffices, environment
    run(worker, ["trained"])
    run(worker, ["trained by its own"], agent_name="my_agent")
    run(worker, ["validated"], validate=True)
    run(worker, ["validated by its own"], validate=True, agent_name="my_agent")
    by_tree = {"trained": has_tree, "validated": has_tree and environment}
    expected = [uid for uid in by_tree if not by_tree[uid] and not plain_suffices]
    expected += [f"{uid} by its own" for uid in by_tree if not by_tree[uid]]
    assert sorted(upstreams) == sorted(expected)
    assert sorted({uid for uid, _ in published} | set(upstreams)) == sorted(
        [*by_tree, *(f"{u} by its own" for u in by_tree)]
    )


ROLLOUT = {"name": "vllm", "full_determinism": False, "trace": {"backend": None}}


@pytest.mark.parametrize("rollout", table(__file__, "keys that only upstreams client implements are left to it"))
def test_keys_that_only_upstreams_client_implements_are_left_to_it(rollout, monkeypatch):
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": ROLLOUT, "model": {"mtp": {"enable": False}}}})
    assert plain_suffices(config, None) and not plain_suffices(config, "a processor of images")
    with monkeypatch.context() as patch:
        patch.setitem(group_rollout._agent_loop_registry, "single_turn_agent", {"_target_": "mine.Agent"})
        assert not plain_suffices(config, None)
    config.actor_rollout_ref.rollout.update(rollout)
    assert not plain_suffices(config, None)


def test_without_calculate_log_probs_plain_rows_have_none_as_upstreams(queue, monkeypatch):
    worker, *_ = queue
    columns = []

    async def put(outputs, prompt, validate):
        columns.extend(output.as_dict() for output in outputs)

    monkeypatch.setattr(worker, "_put_group", put)
    worker.config.actor_rollout_ref.rollout.calculate_log_probs, worker.has_tree = False, False
    run(worker, ["trained"])
    assert len(columns) == 3 and not any("rollout_log_probs" in row for row in columns)


def test_the_samplers_settings_go_with_training_prompts_only(queue):
    worker, *_ = queue
    worker.tree_rollout.validates = True
    settings = {STEP_SETTINGS: PromptSettings(sampler={"temperature_by_entropy": {"std": 1.0}})}
    run(worker, ["trained"], **settings)
    run(worker, ["validated"], validate=True, **settings)
    params = {uid: params for uid, _, params, _ in worker.tree_rollout.asked}
    assert params == {"trained": {"extra_args": {"temperature_by_entropy": {"std": 1.0}}}, "validated": {}}


def test_seeds_differ_by_row_step_and_run_also_without_an_index():
    def seed(text="a", index=0, step=1, run=0, occurrence=0):
        config = DictConfig({"actor_rollout_ref": {"rollout": {"seed": run}}})
        row = {"raw_prompt": [{"role": "user", "content": text}], "index": index}
        task = PromptTask(row, step, PromptSettings(occurrence))
        return TreeRollout.seed_of(SimpleNamespace(config=config), task)

    # upstream gives index 0 to every row without one
    assert len({seed(), seed("b"), seed(index=1), seed(step=2), seed(run=1), seed(occurrence=1)}) == 6
    assert seed() == seed()


def test_the_most_diverse_by_hand():
    responses = [[1, 2, 3, 4], [1, 2, 3, 5], [6, 7, 8, 9], [1, 2, 8, 9]]
    # first 0; farthest from it is 2 (4/4); then 3 (2/4 from both) before 1 (1/4 from 0)
    assert most_diverse(responses, 2) == [0, 2] and most_diverse(responses, 3) == [0, 2, 3]
    assert most_diverse(responses, 4) == [0, 1, 2, 3] and most_diverse([[1]] * 3, 2) == [0, 1]


def test_rows_that_have_a_reward_are_not_scored(queue, monkeypatch):
    worker, published, put = queue

    async def rows(prompt, n, sampling_params, plain):
        outputs = [trajectory(i) for i in range(n)]
        outputs[-1].reward_score, outputs[-1].extra_fields["reward_extra_info"] = 0.0, {"acc": 0.0}
        return outputs

    monkeypatch.setattr(worker.tree_rollout, "run", rows)
    written = []
    queue_rows = group_rollout.queue_rows
    monkeypatch.setattr(
        group_rollout, "queue_rows", lambda outputs, prompt: written.append(outputs) or queue_rows(outputs, prompt)
    )
    run(worker, ["a"])
    assert published[-1] == ("a", "finished") and len(put) == 3
    assert worker.reward_loop_worker_handles[0].sizes == [2]
    assert [output.reward_score for output in written[0]] == [2.0, 3.0, 0.0]
    assert [output.extra_fields["reward_extra_info"]["acc"] for output in written[0]] == [False, True, 0.0]


ROW = {"uid": "u", "index": 3, "global_steps": 7, "raw_prompt": []}


def test_settings_are_read_and_do_not_travel_on():
    of_step = PromptSettings(sampler={"tau": 0.1}, tree=(0.9, 8))
    of_prompt = PromptSettings(occurrence=2, tree=(4,))
    task = PromptTask.of_row({**ROW, STEP_SETTINGS: of_step, PROMPT_SETTINGS: of_prompt})
    assert task.row == ROW and task.step == 7
    assert task.settings == PromptSettings(2, {"tau": 0.1}, (0.9, 8, 4))
    assert [task.settings.tree_record(kind) for kind in (float, int, str)] == [0.9, 4, None]
    for columns in ({}, {STEP_SETTINGS: None, PROMPT_SETTINGS: None}):
        assert PromptTask.of_row({**ROW, **columns}) == PromptTask(ROW, 7, PromptSettings())
