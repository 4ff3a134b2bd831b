"""A batch in TransferQueue as the trainer looks at it: its rows, the prompts that they belong to, and their columns."""

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
import transfer_queue as tq
from tensordict import TensorDict

from verl.trainer.ppo.v1.padding_rows import is_padding_row
from verl.workers.rollout.trajectory_tree import DROPPED_STEPS

# columns that the trainer gives to prompts, and upstream copies to their rows: a number that grows with each submitted
# prompt, and a name that equal prompts share
ORDER, PROBLEM = "explore_order", "explore_problem"


class RowPlace(NamedTuple):
    """The parts of upstream's key {uid}_{session}_{index} of a row."""

    uid: str
    session: int
    index: int


def place_of(key: str) -> RowPlace:
    uid, session, index = key.rsplit("_", 2)
    return RowPlace(uid, int(session), int(index))


class Group(NamedTuple):
    """The rows of one prompt.

    Args:
        order: the step in which it was submitted, and its number; sorts groups as the data came.
        problem: equal for equal prompts.
        rows: their numbers in the batch, by session.
    """

    uid: str
    order: tuple[int, int]
    problem: str
    rows: list[int]


class BatchRows:
    """The rows of a batch in its order, and their columns, each of which is fetched when it is first asked for.

    >>> rows = BatchRows(batch)
    >>> first = rows.groups[0]
    >>> rows.column("responses", first.rows)
    [tensor([5, 8, 2]), tensor([5, 9])]

    Args:
        batch: keys, tags and partition; its padding rows are rows, too, and belong to no group.
    """

    def __init__(self, batch):
        self.keys, self.tags, self.partition_id = list(batch.keys), list(batch.tags), batch.partition_id
        self._columns: dict[str, dict[int, object]] = defaultdict(dict)
        self._padded: dict[str, torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self.keys)

    @cached_property
    def real(self) -> list[int]:
        """Numbers of the rows that are no padding rows."""
        return [row for row, tag in enumerate(self.tags) if not is_padding_row(tag)]

    @cached_property
    def in_data_order(self) -> list[int]:
        """`real`, by when the prompts were submitted, and within a prompt by session."""
        return sorted(self.real, key=lambda row: (self._order(row), place_of(self.keys[row])))

    @cached_property
    def groups(self) -> list[Group]:
        """The group of each prompt that has rows, in the order in which the prompts were submitted."""
        self.fetch(ORDER, PROBLEM)
        rows_of = defaultdict(list)
        for row in self.in_data_order:
            rows_of[place_of(self.keys[row]).uid].append(row)
        problems = self.column(PROBLEM)
        return [Group(uid, self._order(rows[0]), problems[rows[0]], rows) for uid, rows in rows_of.items()]

    @cached_property
    def has_answer(self) -> list[bool]:
        """Whether each row has an answer: it does not end with a step that the search gave up (`train_dropped`)."""
        return (~self.tokens(DROPPED_STEPS.name, 0).bool().any(1)).tolist()

    def answers(self, group: Group) -> list[int]:
        """Return the rows of a group that have an answer."""
        return [row for row in group.rows if self.has_answer[row]]

    def _order(self, row: int) -> tuple[int, int]:
        return self.tags[row].get("global_steps", 0), self.column(ORDER)[row]

    def fetch(self, *names: str) -> None:
        """Get several columns of all rows at once."""
        wanted = [name for name in names if name not in self._columns]
        if not wanted:
            return
        data = tq.kv_batch_get(keys=self.keys, partition_id=self.partition_id, select_fields=wanted)
        for name in wanted:
            self._columns[name] = dict(enumerate(_cells(data[name]))) if name in data.keys() else {}

    def column(self, name: str, rows: Sequence[int] | None = None) -> list | None:
        """Return the cells of a column in these rows (all by default); None if the batch has no such column."""
        rows = range(len(self)) if rows is None else rows
        known = self._columns[name]
        if missing := [row for row in rows if row not in known]:
            keys = [self.keys[row] for row in missing]
            data = tq.kv_batch_get(keys=keys, partition_id=self.partition_id, select_fields=[name])
            if name not in data.keys():
                return None
            known.update(zip(missing, _cells(data[name]), strict=True))
        return [known[row] for row in rows]

    def tokens(self, name: str, fill: float) -> torch.Tensor:
        """Return a column with a number for each response token as (B, T).

        Positions after a row's end, padding rows, and rows without this column hold `fill`.
        """
        if name not in self._padded:
            self._padded[name] = self._pad(name, fill)
        return self._padded[name]

    def _pad(self, name: str, fill: float) -> torch.Tensor:
        lengths, column = [tag["response_len"] for tag in self.tags], self.column(name)
        shape = len(self), max(lengths, default=0)
        if column is None:
            return torch.full((1, 1), fill).expand(shape)  # takes no memory
        padded = torch.full(shape, fill, dtype=column[0].dtype)
        for row in self.real:
            if len(column[row]) != lengths[row]:
                raise ValueError(f"{name} of {self.keys[row]}: {len(column[row])} for {lengths[row]} response tokens")
            padded[row, : lengths[row]] = column[row]
        return padded

    @property
    def index(self) -> np.ndarray:
        """(B,) the prompts' uids; equal ones are one group, and all padding rows share one of their own."""
        return np.array(self.column("uid"), dtype=object)

    def reward_field(self, name: str) -> torch.Tensor:
        """Return the values of a `RewardField` (B,) by the name under which the reward function returns them."""
        values = torch.full((len(self),), torch.nan, dtype=torch.float64)
        for row, extra in zip(self.real, self.column("extra_fields", self.real), strict=True):
            number = (extra.get("reward_extra_info") or {}).get(name, None if self.has_answer[row] else 0.0)
            if number is not None:
                values[row] = float(number)
        return values

    @property
    def rewards(self) -> torch.Tensor:
        """(B, T) the verifier's, in a row's last token."""
        return self.tokens("rm_scores", 0.0)

    @property
    def response_mask(self) -> torch.Tensor:
        """(B, T)"""
        return self.tokens("response_mask", 0)

    def put(self, name: str, values: torch.Tensor, rows: Sequence[int] | None = None) -> None:
        """Write (B, T), or of these rows alone, as a column with a number for each response token."""
        rows = range(len(self)) if rows is None else rows
        cells = [of_row[: self.tags[row]["response_len"]] for row, of_row in zip(rows, values, strict=True)]
        nested = torch.nested.as_nested_tensor(cells, layout=torch.jagged)
        fields = TensorDict({name: nested}, batch_size=len(cells))
        tq.kv_batch_put(keys=[self.keys[row] for row in rows], partition_id=self.partition_id, fields=fields)
        self._columns.pop(name, None)
        self._padded.pop(name, None)


def _cells(column) -> list:
    return list(column.unbind()) if isinstance(column, torch.Tensor) else list(column)
