"""What trainers that look at a whole batch's tokens share: its real rows, the old policy's entropies, new fields."""

from typing import NamedTuple

import torch
import transfer_queue as tq
from tensordict import TensorDict
from verl.workers.utils.padding import response_to_nested


class RowPlace(NamedTuple):
    """What upstream's key {uid}_{session}_{index} of a row says."""

    uid: str
    session: int
    index: int


def place_of(key: str) -> RowPlace:
    uid, session, index = key.rsplit("_", 2)
    return RowPlace(uid, int(session), int(index))


def real_keys(batch) -> list[str]:
    """Keys of the rows that upstream did not add to fill the batch up."""
    return [key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding", False)]


def old_policy_entropy(batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Entropies in nats (B, T), their mask (bool) and the nested mask, after upstream's `_compute_old_log_prob`."""
    fields = ["entropy", "response_mask"]
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
    nested_mask = data["response_mask"]
    data = data.to_padded_tensor()
    return data["entropy"], data["response_mask"].bool(), nested_mask


def put_token_field(batch, name: str, values: torch.Tensor, nested_mask: torch.Tensor):
    """Send `values` (B, T) along with the batch's tokens, as the nested field `name`; returns the batch."""
    fields = TensorDict({name: response_to_nested(values, nested_mask)}, batch_size=len(batch))
    return tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)
