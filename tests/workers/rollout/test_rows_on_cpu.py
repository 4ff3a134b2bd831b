"""A group's rows and rewards are what upstream's worker makes of each trajectory alone: upstream is the oracle."""

import asyncio
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from tensordict import NonTensorData, NonTensorStack
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics
from verl.experimental.reward_loop.reward_loop import RewardLoopWorker

from tests.workers.rollout.group_worker import make_worker
from verl.trainer.ppo.v1 import agent_loop_tq
from verl.workers.rollout import group_rollout
from verl.workers.rollout.rows import Entries, queue_rows
from verl.workers.rollout.tree_rollout import TrajectoryOutput

PROMPT = {
    "uid": "u-1",
    "global_steps": 7,
    "index": 3,
    "raw_prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "1 2 3 = 6"}],
    "data_source": "countdown",
    "reward_model": {"style": "rule", "ground_truth": {"target": 6, "numbers": np.array([1, 2, 3])}},
    "extra_info": {"split": "train", "index": 3},
    "tools_kwargs": {},
    "explore_order": 12,
    "dummy_tensor": torch.tensor([0]),
}
OVERLONG = {"enable": True, "len": 4, "penalty_factor": 1.0, "log": True}


def trajectories(lengths, **more) -> list[TrajectoryOutput]:
    draw = np.random.default_rng(0)
    return [
        TrajectoryOutput(
            prompt_ids=[4, 5, 6],
            response_ids=draw.integers(3, 90, n).tolist(),
            response_mask=draw.integers(0, 2, n).tolist(),
            response_logprobs=draw.random(n).tolist(),
            num_turns=2 + i,
            metrics=AgentLoopMetrics(generate_sequences=1.5, tool_calls=0.25 * i),
            extra_fields={"turn_scores": [], "tool_rewards": [], "min_global_steps": 6, "max_global_steps": 7},
            token_fields={"segment_ids": [i] * n},
        ).model_copy(update=more)
        for i, n in enumerate(lengths)
    ]


# sees the text of the response
REWARD = """
async def score(data_source, solution_str, ground_truth, extra_info, **_):
    seen = f"{data_source} {solution_str} {ground_truth} {extra_info}"
    return {"score": len(solution_str) / 8, "acc": len(solution_str) % 2, "seen": seen}
"""


def reward_handle(model_folder: str, reward_file: Path) -> SimpleNamespace:
    """Return upstream's reward worker, to be called as a Ray actor is."""
    reward_file.write_text(REWARD)
    manager = "pkg://verl.experimental.reward_loop.reward_manager.length_aware"
    reward = {
        "custom_reward_function": {"path": str(reward_file), "name": "score", "reward_kwargs": {}},
        "reward_manager": {"source": "importlib", "name": "LengthAwareRewardManager", "module": {"path": manager}},
        "reward_kwargs": {"max_resp_len": 8, "overlong_buffer_cfg": OVERLONG},
        "reward_model": {"enable": False},
        "sandbox_fusion": {"url": None},
    }
    model = {"tokenizer_path": None, "path": model_folder}
    config = {"reward": reward, "actor_rollout_ref": {"model": model}, "data": {}}
    worker = RewardLoopWorker(OmegaConf.create(config))
    methods = ("compute_score", "compute_score_batch")
    return SimpleNamespace(**{name: SimpleNamespace(remote=getattr(worker, name)) for name in methods})


@pytest.fixture
def make(monkeypatch, model_folder, tmp_path):
    """Makes a worker, and the list of what it has put, in the event loop that calls them."""
    put = []

    async def async_kv_batch_put(keys, fields, tags, partition_id):
        await asyncio.sleep(0)
        for row, (key, tag) in enumerate(zip(keys, tags, strict=True)):
            columns = {} if fields is None else fields
            put.append((key, {name: cell(column, row) for name, column in columns.items()}, tag, partition_id))

    monkeypatch.setattr(agent_loop_tq.tq, "async_kv_batch_put", async_kv_batch_put)
    handle = partial(reward_handle, model_folder, tmp_path / "reward.py")
    return lambda: (make_worker(monkeypatch, model_folder, [handle()]), put)


def cell(column, row: int):
    if isinstance(column, NonTensorStack):
        return column[row].data
    return column.data if isinstance(column, NonTensorData) else column.unbind()[row]


def same(ours: dict, theirs: dict) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        if isinstance(value, torch.Tensor):
            assert ours[name].dtype == value.dtype and torch.equal(ours[name], value), name
        elif isinstance(value, dict):
            same(ours[name], value)
        else:
            assert type(ours[name]) is type(value) and np.all(ours[name] == value), name


@pytest.mark.parametrize("validate", [False, True])
@pytest.mark.parametrize("lengths", [[5, 1, 8, 3], [4, 4, 4], [2], [1 + i % 7 for i in range(20)]])
async def test_rows_are_upstreams(make, lengths, validate):
    worker, put = make()
    for session, output in enumerate(trajectories(lengths)):
        await worker._agent_loop_postprocess(output, validate, session_id=session, **PROMPT)
    theirs, put[:] = list(put), []
    await worker._put_group(trajectories(lengths), PROMPT, validate)
    assert len(put) == len(theirs) == len(lengths)
    for (key, row, tag, partition), (their_key, their_row, their_tag, their_partition) in zip(put, theirs, strict=True):
        assert (key, tag, partition) == (their_key, their_tag, their_partition)
        assert row["metrics"].pop("compute_score") > 0 < their_row["metrics"].pop("compute_score")
        same(row, their_row)
    assert len({row["extra_fields"]["reward_extra_info"]["seen"] for _, row, _, _ in put}) > len(lengths) // 2


async def test_entries_put_during_a_write_share_the_next_write(make, monkeypatch):
    worker, put = make()
    writer, write, sizes = worker.queue["train"], agent_loop_tq.tq.async_kv_batch_put, []

    async def counted(keys, **arguments):
        sizes.append(len(keys))
        if "u-6_0_0" in keys:
            raise ConnectionError("gone")
        await write(keys=keys, **arguments)

    monkeypatch.setattr(agent_loop_tq.tq, "async_kv_batch_put", counted)
    groups = [queue_rows(trajectories([3, 1 + i], reward_score=None), PROMPT | {"uid": f"u-{i}"}) for i in range(7)]
    groups[3] = groups[3]._replace(rows=[row | {"more": 1} for row in groups[3].rows])

    entries = [groups[0], Entries(["u-0"], [{"status": "finished"}]), *groups[1:4]]
    assert await asyncio.gather(*map(writer.put, entries), return_exceptions=True) == [None] * 5
    # all of them have come before the first write begins; a tag, and rows with a column more, take one of their own
    assert sizes == [6, 1, 2]
    rows = {key: row for key, row, _, _ in put}
    assert rows.keys() == {"u-0", *(key for group in groups[:4] for key in group.keys)}
    for group in groups[:4]:
        for key, row in zip(group.keys, group.rows, strict=True):
            assert torch.equal(rows[key]["responses"], row["responses"]) and rows[key]["uid"] == row["uid"].data
            assert rows[key].keys() == row.keys()

    canceled = asyncio.create_task(writer.put(groups[4]))
    await asyncio.sleep(0)
    canceled.cancel()
    await writer.put(groups[5])
    assert canceled.cancelled()
    with pytest.raises(ConnectionError, match="gone"):
        await writer.put(groups[6])
    assert {"u-4_0_0", "u-5_1_0"} <= {key for key, *_ in put}


async def test_rewards_are_shared_among_workers_where_a_group_is_large(make):
    worker, put = make()
    sizes, scorer = [], worker.reward_loop_worker_handles[0]
    score = scorer.compute_score_batch.remote

    def counted(data):
        sizes.append((len(data), data.non_tensor_batch["session_id"].tolist()))
        return score(data)

    scorer.compute_score_batch.remote = counted
    await worker._put_group(trajectories([3] * 40), PROMPT, False)
    together = group_rollout.SCORED_TOGETHER
    assert [size for size, _ in sizes] == [together] * (40 // together) + [40 % together]
    assert [session for _, sessions in sizes for session in sessions] == list(range(40)) and len(put) == 40


async def test_without_reward_workers_rows_have_no_rewards(make):
    worker, put = make()
    worker.reward_loop_worker_handles = None
    await worker._put_group(trajectories([3, 2]), PROMPT, False)
    assert all("rm_scores" not in row for _, row, _, _ in put)
