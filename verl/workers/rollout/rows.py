"""Converts a prompt's finished trajectories to batches for verl's reward loop and TransferQueue, a group at a time.

Upstream (verl 0.9.1) handles each trajectory alone, with one call of a reward worker and four messages to the queue.
The contents of rewards and rows are the same here.
"""

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
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


def queue_rows(
    outputs: Sequence[AgentLoopOutput], prompt: dict[str, Any]
) -> tuple[list[str], TensorDict, list[dict[str, Any]]]:
    """Return keys, columns and tags of a group's text-only rows for TransferQueue; see `reward_batch` for arguments."""
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
    return keys, list_of_dict_to_tensordict(rows), tags
