"""Cuts a mini-batch into micro-batches of rows that share prefixes, by a budget of distinct tokens.

The rows are sorted in the order of their trie, and a micro-batch is a run of neighbors in this order. The budget never
cuts a subtree that fits it; a larger subtree is cut between its own subtrees.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tensordict import TensorDict
from verl.utils.device import get_device_name

from verl.utils import tensordict_utils as tu
from verl.workers.config.prefix_tree import SKIP_ZERO_ADVANTAGES
from verl.workers.engine.prefix_tree.trie import distinct_tokens, sort_by_prefix
from verl.workers.rollout.contexts import CONTEXTS, Sequences, contexts_of_cell, sequences_of_row

Run = tuple[int, int]
# entry of a mini-batch: the model's `TokenBytes`; without it 16 gathered keys count as one token
TOKEN_BYTES = "token_bytes"


@dataclass(frozen=True)
class TokenBytes:
    """The bytes that a micro-batch's tokens take on a GPU while a model of `transformers` trains on them in bfloat16.

    They are those of a token, and of what a prefix tree gathers, at the two moments that may hold most. A forward keeps
    `kept` of each token. The backward begins with `logits`, and goes on with one `layer` after another.
    """

    kept: int  # hidden states before each layer with gradient checkpointing, otherwise every saved tensor of the layers
    layer: int  # saved tensors of a checkpointed layer's second forward; 0 without checkpointing
    logits: int  # the logits and their gradient
    # A key and a value that a segment gathers, and their gradients. Kernels compute these for each query head first,
    # also where query heads share keys.
    gathered: int
    segment: int  # the kernel's float32 sum of query gradients has 128 more rows for each segment

    @classmethod
    def of(cls, hf_config, checkpointing: bool = True) -> "TokenBytes":
        """Return the bytes for a `PretrainedConfig`."""
        text = hf_config.get_text_config()
        hidden, layers, heads = text.hidden_size, text.num_hidden_layers, text.num_attention_heads
        head_dim = getattr(text, "head_dim", None) or hidden // heads
        queries, keys = heads * head_dim, (getattr(text, "num_key_value_heads", None) or heads) * head_dim
        # measured with saved-tensor hooks; 6 of the 10 bytes are of Qwen3's norms of queries and keys
        layer = 8 * text.intermediate_size + 16 * hidden + 10 * (queries + keys)
        return cls(
            kept=2 * hidden * layers if checkpointing else layer * layers,
            layer=layer if checkpointing else 0,
            logits=4 * text.vocab_size,
            gathered=8 * keys + 4 * queries * (queries != keys) + (0 if checkpointing else 4 * keys * (layers - 1)),
            segment=128 * 4 * queries,
        )

    def tokens(self, n_tokens: int, gathered: int, segments: int) -> int:
        """Return the number of tokens without a prefix tree that take as much as `n_tokens` distinct ones of a tree
        whose `segments` gather so many keys."""
        more = max(0, gathered - n_tokens) * self.gathered + segments * self.segment
        spare = max(0, self.logits - self.layer) * n_tokens if self.layer else 0  # logits are gone before the layers
        return n_tokens + max(0, more - spare) // (self.kept + max(self.logits, self.layer))


USUAL_BYTES = TokenBytes(kept=16, layer=0, logits=0, gathered=1, segment=0)


class TrieOrder:
    """Rows in the order of their trie (`order`); a run (start, end) holds the rows `order[start:end]`. A row with
    contexts lies where its first sequence does, and counts what it shares with the row before it only."""

    def __init__(
        self, rows: Sequence[Sequences], kinds: Sequence[float] | None = None, token_bytes: TokenBytes = USUAL_BYTES
    ):
        self.bytes = token_bytes
        firsts = [np.ascontiguousarray(row.tokens[0], dtype=np.int64) for row in rows]
        self.order, shared = sort_by_prefix(firsts, kinds)
        self.shared = np.array(shared)
        self.lengths = np.array([len(firsts[index]) for index in self.order])  # distinct tokens of each row
        for i, index in enumerate(self.order):
            before = rows[self.order[i - 1]] if self.shared[i] else None
            if len(rows[index].tokens) > 1 or (before and len(before.tokens) > 1):
                self.lengths[i] = distinct_tokens(rows[index].tokens)
                if before:
                    both = distinct_tokens([*before.tokens, *rows[index].tokens])
                    self.shared[i] = self.lengths[i - 1] + self.lengths[i] - both
        self._added = np.append(0, np.cumsum(self.lengths - self.shared))
        self._all = np.append(0, np.cumsum([rows[index].n_tokens for index in self.order]))
        # the last row before each that shares no more with its predecessor; 0 if there is none
        self._lower = np.zeros(len(rows), dtype=np.int64)
        stack: list[int] = []
        for i, shared in enumerate(self.shared):
            while stack and self.shared[stack[-1]] > shared:
                stack.pop()
            self._lower[i] = stack[-1] if stack else 0
            stack.append(i)

    def tokens(self, run: Run) -> int:
        """Return the number of distinct tokens in the run's trie; with contexts, at least that."""
        start, end = run
        return int(self._added[end] - self._added[start] + self.shared[start])

    def cost(self, run: Run) -> int:
        """Return the run's cost in tokens of the budget: its distinct tokens, and what its segments gather beyond them
        (`TokenBytes.tokens`)."""
        return self.bytes.tokens(self.tokens(run), *self.gathered(run))

    def gathered(self, run: Run) -> tuple[int, int]:
        """Return the number of keys that the segments of the run's trie gather, each its path from the root, and of
        these segments. Both are upper bounds if a row is a prefix of another or has contexts."""
        start, end = run
        forks = np.arange(start + 1, end)
        before = self._lower[forks]
        # rows that fork where an earlier row of the run has forked add no inner segment
        is_new = (self.shared[forks] > 0) & ((before <= start) | (self.shared[before] < self.shared[forks]))
        inner = self.shared[forks[is_new]]
        return int(self._all[end] - self._all[start] + inner.sum()), end - start + len(inner)

    def subtrees(self, run: Run) -> list[Run]:
        """Return the run cut at each place where neighbors share the shortest prefix."""
        start, end = run
        inner = self.shared[start + 1 : end]
        cuts = [start, *(np.flatnonzero(inner == inner.min()) + start + 1).tolist(), end]
        return list(zip(cuts[:-1], cuts[1:], strict=True))

    def halves(self, run: Run) -> list[Run]:
        """Return the run cut in two at the place among those of `subtrees` that makes the distinct tokens most even."""
        start, end = run
        cuts = [begin for begin, _ in self.subtrees(run)[1:]]
        even = min(cuts, key=lambda cut: abs(self.tokens((start, cut)) - self.tokens((cut, end))))
        return [(start, even), (even, end)]

    def runs_within(self, budget: int) -> list[Run]:
        """Return few runs whose `cost` is at most `budget`; raise ValueError if a row alone has more tokens."""
        if self.lengths.max() > budget:
            raise ValueError(
                f"use_prefix_tree: a row of {self.lengths.max()} tokens exceeds the {budget} of a micro-batch: raise "
                "actor.ppo_max_token_len_per_gpu, and log_prob_max_token_len_per_gpu of rollout and ref if set"
            )
        runs: list[Run] = []
        parts = [(0, len(self.order))]
        while parts:
            start, end = parts.pop(0)
            if runs and self.cost((runs[-1][0], end)) <= budget:
                runs[-1] = (runs[-1][0], end)
            elif end - start == 1 or self.cost((start, end)) <= budget:
                runs.append((start, end))
            else:
                parts = self.subtrees((start, end)) + parts
        return runs

    def at_least(self, runs: list[Run], count: int) -> list[Run]:
        """Return the runs after halving the one with most distinct tokens until there are `count`, or one per row."""
        runs = list(runs)
        while len(runs) < min(count, len(self.order)):
            largest = max((run for run in runs if run[1] - run[0] > 1), key=self.tokens)
            place = runs.index(largest)
            runs[place : place + 1] = self.halves(largest)
        return runs


def rows_and_temperatures(data: TensorDict) -> tuple[list[Sequences], list[float]]:
    """Return the rows of the nested `input_ids` with their contexts, and each row's temperature."""
    temperature, tokens = data["temperature"], _cells(data["input_ids"])
    contexts = map(contexts_of_cell, _cells(data[CONTEXTS])) if CONTEXTS in data.keys() else [[]] * len(tokens)
    rows = [sequences_of_row(row, row_contexts) for row, row_contexts in zip(tokens, contexts, strict=True)]
    return rows, temperature.tolist() if isinstance(temperature, torch.Tensor) else [float(temperature)] * len(rows)


def _cells(column: torch.Tensor) -> list[np.ndarray]:
    return np.split(column.values().cpu().numpy(), column.offsets()[1:-1].cpu().numpy())


def trained_rows(data: TensorDict) -> list[int]:
    """Return the indices of the rows to compute: all, or with SKIP_ZERO_ADVANTAGES the rows with an advantage other
    than 0, because the others have no gradient; if there are none, the first row."""
    rows = list(range(len(data)))
    if not tu.get_non_tensor_data(data=data, key=SKIP_ZERO_ADVANTAGES, default=False):
        return rows
    has_advantage = torch.stack([advantages.any() for advantages in data["advantages"].unbind()]).tolist()
    return [row for row in rows if has_advantage[row]] or rows[:1]


def prepare_micro_batches(data: TensorDict, dp_group=None) -> tuple[list[TensorDict], list[list[int]]]:
    """Return micro-batches and the row indices of each, like upstream's function of this name.

    All ranks of `dp_group` get the same number. With `use_dynamic_bsz` a micro-batch costs at most
    `max_token_len_per_gpu` (`TrieOrder.cost`) and holds only `trained_rows`, and other rows if a rank has too few of
    them; without it, it holds `micro_batch_size_per_gpu` rows. Afterwards `use_dynamic_bsz` is set in `data` in both
    cases, because upstream restores the order of outputs only with it.
    """
    rows, kinds = rows_and_temperatures(data)
    token_bytes = tu.get_non_tensor_data(data=data, key=TOKEN_BYTES, default=USUAL_BYTES)

    def order_of(chosen: list[int]) -> TrieOrder:
        return TrieOrder([rows[row] for row in chosen], [kinds[row] for row in chosen], token_bytes)

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
    indices = [[chosen[row] for row in order.order[start:end]] for start, end in runs]
    return [tu.index_select_tensor_dict(data, run_rows) for run_rows in indices], indices


def _most_over_ranks(number: int, dp_group) -> int:
    if dp_group is None:
        return number
    most = torch.tensor([number], device=get_device_name())
    torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX, group=dp_group)
    return int(most.item())
