"""The trainer's view of a batch in TransferQueue: its rows, the prompts of the rows, and their columns."""

import pickle
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from types import SimpleNamespace
from typing import NamedTuple, TypeVar
from unittest.mock import patch

import numpy as np
import torch
import transfer_queue as tq
from omegaconf import DictConfig
from tensordict import NonTensorStack, TensorDict

from verl.trainer.ppo.credit.nodes import groups_of_equals
from verl.trainer.ppo.v1 import trainer_base
from verl.utils import transferqueue_utils
from verl.utils.parts import Compares, compares
from verl.workers.rollout.trajectory_tree import DROPPED_STEPS, TREE_DATA

T = TypeVar("T")
# Columns that the trainer adds to prompts and upstream copies to their rows: a number that grows with each submitted
# prompt, and a name that equal prompts share.
ORDER, PROBLEM = "explore_order", "explore_problem"
# The only column without tensors that upstream's engines read.
PICTURES = "multi_modal_inputs"
# Columns of numbers for each token on which an update depends, in the order of their computation, and their source.
COMPUTED_BY = {
    "rm_scores": "the reward",
    "rollout_log_probs": "the engine, whose weights are then not those of the trainer",
    "old_log_probs": "the actor",
    "ref_log_prob": "the reference policy",
    "values": "the critic",
    "advantages": "algorithm.adv_estimator",
    "returns": "algorithm.adv_estimator",
}


def is_padding_row(tag: dict) -> bool:
    """Return whether a row with this tag is a padding row."""
    return bool(tag.get("is_padding", False))


class RowPlace(NamedTuple):
    """The parts of upstream's key {uid}_{session}_{index} of a row: its prompt in this step, its trajectory within the
    group, and its number within the trajectory (0 unless an agent loop makes several rows of one trajectory)."""

    uid: str
    session: int
    index: int


def place_of(key: str) -> RowPlace:
    """Return the parts of a row's key."""
    uid, session, index = key.rsplit("_", 2)
    return RowPlace(uid, int(session), int(index))


class Group(NamedTuple):
    """The rows of one prompt."""

    uid: str
    order: tuple[int, int]  # (step in which the prompt was submitted, running number); sorts as the data
    problem: str  # name of the problem, equal for equal prompts
    rows: list[int]  # numbers of the group's rows in the batch, sorted by session


class BatchRows:
    """A batch's rows in their order, and their columns; a column is fetched when it is first read.

    `batch` is upstream's, with keys, tags and partition. Its padding rows are rows, but belong to no group.

    >>> rows = BatchRows(batch)
    >>> rows.column("responses", rows.groups[0].rows)
    [tensor([5, 8, 2]), tensor([5, 9])]
    """

    def __init__(self, batch):
        self.keys, self.tags, self.partition_id = list(batch.keys), list(batch.tags), batch.partition_id
        self.batch = batch
        self._columns: dict[str, list | None] = {}  # None: the batch does not have the column
        self._padded: dict[str, torch.Tensor] = {}
        self._changed: set[str] | None = None  # columns to be sent, while `held`

    def __len__(self) -> int:
        return len(self.keys)

    @cached_property
    def real(self) -> list[int]:
        """Numbers of the rows that are not padding rows."""
        return [row for row, tag in enumerate(self.tags) if not is_padding_row(tag)]

    @cached_property
    def in_data_order(self) -> list[int]:
        """The rows `real`, sorted by their prompts' submission, and within a prompt by session."""
        order = self._order
        return sorted(self.real, key=lambda row: (order[row], place_of(self.keys[row])))

    @cached_property
    def groups(self) -> list[Group]:
        """The group of each prompt that has rows, sorted by the prompts' submission."""
        self.fetch(ORDER, PROBLEM)
        rows_of = defaultdict(list)
        for row in self.in_data_order:
            rows_of[place_of(self.keys[row]).uid].append(row)
        problems = self.column(PROBLEM)
        return [Group(uid, self._order[rows[0]], problems[rows[0]], rows) for uid, rows in rows_of.items()]

    @cached_property
    def has_answer(self) -> list[bool]:
        """Whether each row has an answer; False if it ends with a step that the search dropped (`train_dropped`)."""
        return (~self.tokens(DROPPED_STEPS.name, 0).bool().any(1)).tolist()

    def answers(self, group: Group) -> list[int]:
        """Return the rows of a group that have an answer."""
        return [row for row in group.rows if self.has_answer[row]]

    def tree_data(self, group: Group, kind: type[T]) -> T:
        """Return the record that the group's tree policy made for the trainer (`BranchPolicy.data_for_trainer`)."""
        pickled = self.column("extra_fields", group.rows[:1])[0].get(TREE_DATA)
        record = None if pickled is None else pickle.loads(pickled)
        if not isinstance(record, kind):
            raise ValueError(f"the rows of prompt {group.uid} hold {record!r} of their tree, and no {kind.__name__}")
        return record

    @cached_property
    def _order(self) -> list[tuple[int, int]]:
        return [(tag.get("global_steps", 0), order) for tag, order in zip(self.tags, self.column(ORDER), strict=True)]

    def fetch(self, *names: str) -> None:
        """Fetch several columns in one request."""
        if missing := [name for name in names if name not in self._columns]:
            data = tq.kv_batch_get(keys=self.keys, partition_id=self.partition_id, select_fields=missing)
            self._columns |= {name: _cells(data[name]) if name in data.keys() else None for name in missing}

    @contextmanager
    def held(self, *names: str, absent: Sequence[str] = ()) -> Iterator[None]:
        """Fetch columns in one request, from which upstream's trainer is answered until the end; what it writes and
        what is `put` in the meantime is then sent in one request, and kept here. Nothing is sent after an exception.
        The batch does not have the columns `absent`.

        Upstream's `_compute_old_log_prob` and `_compute_advantage` (verl 0.9.1) ask by `trainer_base.tq`, which is
        replaced here for this time. A request takes longer than a small batch's advantages.
        """
        self._columns |= dict.fromkeys(absent)
        self.fetch(*names)
        self._changed = changed = set()
        queue = SimpleNamespace(kv_batch_get=self._answer, kv_batch_put=self._keep)
        try:
            with patch.object(trainer_base, "tq", queue):
                yield
        finally:
            self._changed = None
        if changed:
            fields = TensorDict({name: _nested(self.column(name)) for name in changed}, batch_size=len(self))
            self.batch = tq.kv_batch_put(keys=self.keys, partition_id=self.partition_id, fields=fields)

    def _answer(self, keys: Sequence[str], partition_id: str, select_fields: Sequence[str]) -> TensorDict:
        self.fetch(*select_fields)
        fields = {
            name: _nested(cells) if isinstance(cells[0], torch.Tensor) else NonTensorStack(*cells)
            for name in select_fields
            if (cells := self._columns[name]) is not None
        }
        return TensorDict(fields, batch_size=len(self))

    def _keep(self, keys: Sequence[str], partition_id: str, fields: TensorDict):
        for name, column in fields.items():
            self._set(name, range(len(self)), _cells(column))
        return self.batch

    def _set(self, name: str, rows: Sequence[int], cells: Sequence) -> None:
        if len(rows) < len(self):
            self.fetch(name)
        column = self._columns[name] = self._columns.get(name) or [None] * len(self)
        for row, cell in zip(rows, cells, strict=True):
            column[row] = cell
        self._changed.add(name)
        self._padded.pop(name, None)

    def column(self, name: str, rows: Sequence[int] | None = None) -> list | None:
        """Return the cells of a column in these rows (all by default); None if the batch has no such column."""
        self.fetch(name)
        cells = self._columns[name]
        return None if cells is None else [cells[row] for row in (range(len(self)) if rows is None else rows)]

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
        """Prompt uids (B,), equal within a group; all padding rows share a uid of their own."""
        return np.array(self.column("uid"), dtype=object)

    def reward_field(self, name: str) -> torch.Tensor:
        """Return the numbers (B,) that the reward function returned as `name`.

        Where it returned none, rows without an answer hold 0, and all others, padding rows too, hold NaN.
        """
        values = torch.full((len(self),), torch.nan, dtype=torch.float64)
        for row, extra in zip(self.real, self.column("extra_fields", self.real), strict=True):
            number = (extra.get("reward_extra_info") or {}).get(name, None if self.has_answer[row] else 0.0)
            if number is not None:
                values[row] = float(number)
        return values

    @property
    def rewards(self) -> torch.Tensor:
        """The verifier's rewards (B, T), each at its row's last token."""
        return self.tokens("rm_scores", 0.0)

    @property
    def response_mask(self) -> torch.Tensor:
        """The response mask (B, T), 0 or 1."""
        return self.tokens("response_mask", 0)

    def put(self, name: str, values: torch.Tensor, rows: Sequence[int] | None = None) -> None:
        """Write a column from `values` (B, T), or (len(rows), T) for these rows, up to each row's end."""
        rows = range(len(self)) if rows is None else rows
        cells = [tokens[: self.tags[row]["response_len"]] for row, tokens in zip(rows, values, strict=True)]
        if self._changed is not None:
            return self._set(name, rows, cells)
        fields = TensorDict({name: _nested(cells)}, batch_size=len(cells))
        tq.kv_batch_put(keys=[self.keys[row] for row in rows], partition_id=self.partition_id, fields=fields)
        self._columns.pop(name, None)
        self._padded.pop(name, None)


def _cells(column) -> list:
    return list(column.unbind()) if isinstance(column, torch.Tensor) else list(column)


def _nested(cells: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(list(cells), layout=torch.jagged)


def send_tensors_only(workers, *methods: str) -> None:
    """Let these methods of a worker group, which take a batch, fetch only its tensors and pictures.

    Without a choice upstream's workers fetch all columns, and the engine moves each Python object to the device by
    itself, for each micro-batch anew (verl 0.9.1). An engine of your own that reads such a column does not get it.
    """

    def with_tensors_only(call, batch):
        fields = batch.fields
        columns = transferqueue_utils.kv_batch_meta2batch_meta(batch).field_schema
        batch.fields = [name for name, it in columns.items() if name == PICTURES or not it["is_non_tensor"]]
        try:
            return call(batch)
        finally:
            batch.fields = fields

    for method in methods:
        setattr(workers, method, partial(with_tensors_only, getattr(workers, method)))


# ---- what no update can learn from ----


def not_finite(rows: BatchRows) -> str | None:
    """Return a text that names the first column with NaN or infinity, and what computed it; None if there is none."""
    rows.fetch(*COMPUTED_BY)
    for name, computed_by in COMPUTED_BY.items():
        cells = rows.column(name, rows.real)
        if cells and not torch.cat(cells).isfinite().all():
            faulty = sum(not cell.isfinite().all() for cell in cells)
            return f"{name} of {faulty} of {len(cells)} responses, computed by {computed_by}"
    return None


def rewards_column(algorithm: DictConfig) -> str:
    """Return the name of the column of token-level rewards that credit reads: `rm_scores`, or with `use_kl_in_reward`
    `token_level_rewards`, from which upstream has subtracted the KL penalty."""
    return "token_level_rewards" if algorithm.use_kl_in_reward else "rm_scores"


def zero_equal_groups(rows: BatchRows, algorithm: DictConfig) -> None:
    """Write advantages of 0 for the groups with equal outcomes, where upstream's estimators leave rounding errors.

    An estimator that compares more than these outcomes is left alone.
    """
    if compares(algorithm.adv_estimator) is Compares.GROUP:
        rows.fetch("uid", rewards_column(algorithm))
        groups = torch.from_numpy(np.unique(rows.index, return_inverse=True)[1])
        equal = groups_of_equals(rows.tokens(rewards_column(algorithm), 0.0).sum(-1), groups)
        zero_advantages(rows, [row for row in rows.real if equal[row]])


def zero_advantages(rows: BatchRows, zeroed: Sequence[int]) -> None:
    """Write advantages and returns of 0 for these rows."""
    if zeroed:
        zeros = torch.zeros(len(zeroed), max(rows.tags[row]["response_len"] for row in zeroed))
        for name in ("advantages", "returns"):
            rows.put(name, zeros, zeroed)
