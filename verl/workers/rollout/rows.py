"""Converts a prompt's finished trajectories to batches for verl's reward loop and TransferQueue, a group at a time.

Upstream (verl 0.9.1) handles each trajectory alone, with one call of a reward worker and several messages to the queue.
The contents of rewards and rows are the same here.
"""

import asyncio
from array import array
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import transfer_queue as tq
from tensordict import NonTensorData, TensorDict
from torch.nn.utils.rnn import pad_sequence
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.utils.model import compute_position_id_with_mask
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from verl import DataProto


def as_array(values: Sequence[float]) -> np.ndarray:
    """Return numbers as int64 if all are integers, otherwise as float32, three times as fast as torch reads a list."""
    try:
        return np.asarray(array("q", values))
    except TypeError:
        return np.asarray(array("f", values))


def reward_batch(outputs: Sequence[AgentLoopOutput], prompt: dict[str, Any], first_session: int = 0) -> DataProto:
    """Return the batch for `RewardLoopWorker.compute_score_batch`: one row per trajectory of a prompt, padded on the
    right. `first_session` is the index of the first output within its group."""
    n, prompts = len(outputs), torch.from_numpy(as_array(outputs[0].prompt_ids)).expand(len(outputs), -1)
    responses = [torch.from_numpy(as_array(output.response_ids)) for output in outputs]
    padded = pad_sequence(responses, batch_first=True)
    lengths = torch.tensor([len(response) for response in responses])
    mask = torch.arange(padded.shape[1]) < lengths[:, None]
    attention_mask = torch.cat([torch.ones_like(prompts), mask.long()], dim=1)
    tensors = {
        "prompts": prompts,
        "responses": padded,
        "attention_mask": attention_mask,
        "input_ids": torch.cat([prompts, padded], dim=1),
        "position_ids": compute_position_id_with_mask(attention_mask),
    }
    others = {name: np.array([value] * n) for name, value in prompt.items()}
    others |= {
        "session_id": np.arange(first_session, first_session + n),
        "__num_turns__": np.array([output.num_turns for output in outputs]),
        "tool_extra_fields": np.array([output.extra_fields for output in outputs], dtype=object),
        "prompt_len": np.full(n, prompts.shape[1]),
        "response_len": lengths.numpy(),
    }
    return DataProto(batch=TensorDict(tensors, batch_size=n), non_tensor_batch=others)


class Entries(NamedTuple):
    """One write into TransferQueue: a key and a tag for each row, and the rows unless only tags change."""

    keys: list[str]
    tags: list[dict[str, Any]]
    rows: list[dict[str, Any]] = []


def queue_rows(outputs: Sequence[AgentLoopOutput], prompt: dict[str, Any]) -> Entries:
    """Return a group's text-only rows for TransferQueue; see `reward_batch` for the arguments."""
    rows, tags = [], []
    # Non-tensor values are wrapped once here, because wrapping them in every row would take most of the time.
    prompt_columns = {
        name: value if isinstance(value, torch.Tensor) else NonTensorData(value)
        for name, value in (prompt | {"multi_modal_inputs": {}}).items()
    }
    for session, output in enumerate(outputs):
        row = output.as_dict() | prompt_columns | {"session_id": session}
        row.pop("multi_modal_data", None)
        row["loss_mask"] = row["response_mask"]
        row["input_ids"] = torch.cat([row["prompts"], row["responses"]])
        row["position_ids"] = torch.arange(len(row["input_ids"]))
        rows.append(row)
        n_prompt, n_response = len(row["prompts"]), len(row["responses"])
        lengths = {"prompt_len": n_prompt, "response_len": n_response, "seq_len": n_prompt + n_response}
        versions = {name: row["extra_fields"].get(name) for name in ("min_global_steps", "max_global_steps")}
        tags.append({"status": "success", **lengths, "global_steps": prompt["global_steps"], **versions})
    keys = [f"{prompt['uid']}_{session}_0" for session in range(len(rows))]
    return Entries(keys, tags, rows)


class QueueWriter:
    """Writes to one partition of TransferQueue. What is put during a write goes out together in the next one: a write
    takes five messages, and the prompts of a step begin and end close to each other."""

    def __init__(self, partition: str):
        self.partition = partition
        self.waiting: list[tuple[Entries, asyncio.Future]] = []
        self.writing: asyncio.Task | None = None

    async def put(self, entries: Entries) -> None:
        """Return once the entries are written. If this call is canceled, it ends only then."""
        done = asyncio.get_running_loop().create_future()
        self.waiting.append((entries, done))
        if self.writing is None or self.writing.done():
            self.writing = asyncio.create_task(self._write())
        try:
            await asyncio.shield(done)
        finally:
            await asyncio.wait({done})

    async def _write(self) -> None:
        while self.waiting:
            puts, self.waiting = self.waiting, []
            by_columns = defaultdict(list)  # only rows with the same columns fit into one write
            for entries, _ in puts:
                by_columns[frozenset(entries.rows[0]) if entries.rows else None].append(entries)
            error: BaseException | None = None
            try:
                for together in by_columns.values():
                    keys, tags, rows = ([each for entries in together for each in entries[i]] for i in range(3))
                    fields = list_of_dict_to_tensordict(rows) if rows else None
                    await tq.async_kv_batch_put(keys=keys, partition_id=self.partition, fields=fields, tags=tags)
            except BaseException as raised:
                error = raised
            for _, done in puts:
                done.set_result(None) if error is None else done.set_exception(error)
