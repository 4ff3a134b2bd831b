"""Which rows share a micro-batch: rows in the order of their trie, cut where the budget of distinct tokens is used up.

A micro-batch is a run of neighbors in this order, so that rows with common prefixes stay together. A subtree that fits
the budget is never cut for it; one that does not is cut between its subtrees.
"""

from collections.abc import Sequence

import numpy as np
import torch
from tensordict import TensorDict
from verl.utils.device import get_device_name

from verl.utils import tensordict_utils as tu
from verl.workers.config.prefix_tree import SKIP_ZERO_ADVANTAGES
from verl.workers.engine.prefix_tree.trie import sort_by_prefix

Run = tuple[int, int]
# A layer gathers keys and values along the path of every segment. So many gathered tokens count as one of the budget: a
# token's other activations take 8 (full attention heads) to 80 (grouped query attention) times its keys and values.
GATHERED_A_TOKEN = 16


class TrieOrder:
    """Rows in the order of their trie; a run (start, end) is the rows from `start` to before `end` there."""

    def __init__(self, rows: Sequence[np.ndarray], kinds: Sequence[float] | None = None):
        self.order, shared = sort_by_prefix([np.ascontiguousarray(row, dtype=np.int64) for row in rows], kinds)
        self.shared = np.array(shared)
        self.lengths = np.array([len(rows[index]) for index in self.order])
        self._added = np.append(0, np.cumsum(self.lengths - self.shared))
        self._all = np.append(0, np.cumsum(self.lengths))

    def tokens(self, run: Run) -> int:
        """Return the number of distinct tokens in the run's trie."""
        start, end = run
        return int(self._added[end] - self._added[start] + self.shared[start])

    def cost(self, run: Run) -> int:
        """Return the share of the budget that the run takes: its distinct tokens, and the keys gathered beyond them."""
        start, end = run
        distinct = self.tokens(run)
        return distinct + int(self._all[end] - self._all[start] - distinct) // GATHERED_A_TOKEN

    def subtrees(self, run: Run) -> list[Run]:
        """The run cut wherever the shared prefix is shortest."""
        start, end = run
        inner = self.shared[start + 1 : end]
        cuts = [start, *(np.flatnonzero(inner == inner.min()) + start + 1).tolist(), end]
        return list(zip(cuts[:-1], cuts[1:], strict=True))

    def halves(self, run: Run) -> list[Run]:
        """The run cut once where the shared prefix is shortest; of several such places, at the most even one."""
        start, end = run
        cuts = [begin for begin, _ in self.subtrees(run)[1:]]
        even = min(cuts, key=lambda cut: abs(self.tokens((start, cut)) - self.tokens((cut, end))))
        return [(start, even), (even, end)]

    def runs_within(self, budget: int) -> list[Run]:
        """Return few runs of at most `budget` tokens each, by `cost`; raise ValueError if a row alone has more."""
        if self.lengths.max() > budget:
            raise ValueError(
                f"use_prefix_tree: a row of {self.lengths.max()} tokens exceeds the {budget} of a micro-batch: raise "
                "actor_rollout_ref.actor.ppo_max_token_len_per_gpu, and rollout.log_prob_max_token_len_per_gpu and "
                "ref.log_prob_max_token_len_per_gpu if they were set"
            )
        runs: list[Run] = []
        parts = [(0, len(self.order))]
        while parts:
            start, end = parts.pop(0)
            if runs and self.cost((runs[-1][0], end)) <= budget:
                runs[-1] = (runs[-1][0], end)
            elif self.cost((start, end)) <= budget:
                runs.append((start, end))
            else:
                parts = self.subtrees((start, end)) + parts
        return runs

    def at_least(self, runs: list[Run], count: int) -> list[Run]:
        """The runs, the largest of which are cut until there are `count`, or a run for each row."""
        runs = list(runs)
        while len(runs) < min(count, len(self.order)):
            largest = max((run for run in runs if run[1] - run[0] > 1), key=self.tokens)
            place = runs.index(largest)
            runs[place : place + 1] = self.halves(largest)
        return runs

    def rows(self, runs: list[Run]) -> list[list[int]]:
        """The runs' rows, as numbered in the constructor's `rows`."""
        return [self.order[start:end] for start, end in runs]


def rows_and_temperatures(data: TensorDict) -> tuple[list[np.ndarray], list[float]]:
    """Of nested `input_ids` the rows, and the temperature of each, which is a number or a tensor (B,) in `data`."""
    input_ids, temperature = data["input_ids"], data["temperature"]
    rows = np.split(input_ids.values().cpu().numpy(), input_ids.offsets()[1:-1].cpu().numpy())
    return rows, temperature.tolist() if isinstance(temperature, torch.Tensor) else [float(temperature)] * len(rows)


def trained_rows(data: TensorDict) -> list[int]:
    """The rows that are computed: with SKIP_ZERO_ADVANTAGES, which says that others have no gradient, those with an
    advantage other than 0, or the first row where there is none."""
    rows = list(range(len(data)))
    if not tu.get_non_tensor_data(data=data, key=SKIP_ZERO_ADVANTAGES, default=False):
        return rows
    teaches = torch.stack([advantages.any() for advantages in data["advantages"].unbind()]).tolist()
    return [row for row in rows if teaches[row]] or rows[:1]


def prepare_micro_batches(data: TensorDict, dp_group=None) -> tuple[list[TensorDict], list[list[int]]]:
    """Micro-batches, equally many on all ranks of `dp_group`, and the rows in each; see upstream's function.

    With `use_dynamic_bsz` they have at most `max_token_len_per_gpu` tokens by `TrieOrder.cost`, and hold
    `trained_rows`, with others only where a rank has too few for its micro-batches; else `micro_batch_size_per_gpu`
    rows. `data` then says `use_dynamic_bsz` either way, because upstream puts outputs back into order only with it.
    """
    rows, kinds = rows_and_temperatures(data)

    def order_of(chosen: list[int]) -> TrieOrder:
        return TrieOrder([rows[row] for row in chosen], [kinds[row] for row in chosen])

    if tu.get_non_tensor_data(data=data, key="use_dynamic_bsz", default=True):
        chosen = trained_rows(data)
        order = order_of(chosen)
        runs = order.runs_within(data["max_token_len_per_gpu"])
        most = _most_over_ranks(len(runs), dp_group)
        if most > len(chosen):
            chosen += [row for row in range(len(rows)) if row not in chosen][: most - len(chosen)]
            order = order_of(chosen)
            runs = order.runs_within(data["max_token_len_per_gpu"])
        runs = order.at_least(runs, most)
    else:
        chosen, size = list(range(len(rows))), data["micro_batch_size_per_gpu"]
        if len(rows) % size:
            raise ValueError(f"use_prefix_tree: micro_batch_size_per_gpu={size} does not divide {len(rows)} rows")
        order = order_of(chosen)
        runs = [(start, start + size) for start in range(0, len(rows), size)]
        tu.assign_non_tensor(data, use_dynamic_bsz=True)
    indices = [[chosen[row] for row in of_run] for of_run in order.rows(runs)]
    return [tu.index_select_tensor_dict(data, of_run) for of_run in indices], indices


def _most_over_ranks(number: int, dp_group) -> int:
    if dp_group is None:
        return number
    most = torch.tensor([number], device=get_device_name())
    torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX, group=dp_group)
    return int(most.item())
