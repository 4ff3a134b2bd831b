"""Log-probabilities and entropies of a trie's nodes, and of the sequences in it.

Shapes: N nodes, V tokens in the vocabulary.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from verl.workers.config.prefix_tree import check_model_config
from verl.workers.engine.prefix_tree.attention import NAME, TrieSegments
from verl.workers.engine.prefix_tree.trie import Trie, build_trie
from verl.workers.rollout.contexts import Sequences, sequences_of_row

CHUNK_ELEMENTS = 2**24


class _ChosenLogProbs(torch.autograd.Function):
    """The function log softmax(logits[row])[token] for pairs of rows and tokens, at least in float32. The logits are
    the only tensor of their size that is kept; autograd of the plain formula would keep two more copies."""

    @staticmethod
    def forward(ctx, logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        log_sum_exp = torch.cat([chunk.to(dtype).logsumexp(-1) for chunk in logits.split(_chunk_rows(logits))])
        ctx.save_for_backward(logits, log_sum_exp, rows, tokens)
        return logits[rows, tokens].to(dtype) - log_sum_exp[rows]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient: torch.Tensor):
        logits, log_sum_exp, rows, tokens = ctx.saved_tensors
        row_gradient = torch.zeros_like(log_sum_exp).index_add_(0, rows, gradient)[:, None]
        rows, order = rows.sort()
        tokens, gradient = tokens[order], gradient[order]
        result, size = torch.empty_like(logits), _chunk_rows(logits)
        starts = torch.arange(0, len(logits) + size, size, device=rows.device)
        pairs = torch.searchsorted(rows, starts).tolist()
        for chunk, start in enumerate(range(0, len(logits), size)):
            part, own = slice(start, start + size), slice(pairs[chunk], pairs[chunk + 1])
            dense = (logits[part].to(log_sum_exp.dtype) - log_sum_exp[part, None]).exp_().mul_(-row_gradient[part])
            # 1 - p of a likely token is small, so the subtraction comes before rounding to the logits' precision
            result[part] = dense.index_put_((rows[own] - start, tokens[own]), gradient[own], accumulate=True)
        return result, None, None


def _chunk_rows(logits: torch.Tensor) -> int:
    return max(1, CHUNK_ELEMENTS // logits.shape[-1])


class TrieBatch:
    """A micro-batch's trie as tensors on a device: the inputs of the model's forward, and methods for its logits.

    Attributes:
        trie: trie of N nodes; rows share nodes only at equal temperature.
        model_inputs: keyword arguments of the model's forward, one packed row of N tokens.
        temperature: (N,) float64, temperature of each node; None if all are 1.
        own_nodes: (T,) int64, node after which the next token of the row was drawn, for each token of the concatenated
            rows, T tokens in all; that of the token itself, unless the next token follows a context.
        next_nodes: (T,) int64, node of the next token in the row; a root for a last token, and for untrained ones.
        n_tokens: number of tokens of all sequences.
    """

    def __init__(self, rows: Sequence[Sequences], temperatures: Sequence[float], device: torch.device):
        kinds = [value for row, value in zip(rows, temperatures, strict=True) for _ in row.tokens]
        self.trie: Trie = build_trie([sequence for row in rows for sequence in row.tokens], kinds)
        self.n_tokens = sum(row.n_tokens for row in rows)
        node_of, places, at = [], [], 0
        for row in rows:
            nodes = self.trie.node_of[at : at + len(row.tokens)]
            places.append(np.concatenate(nodes))
            node_of.append(row.of_row(nodes, fill=nodes[0][0]))
            at += len(nodes)
        inner = np.flatnonzero(self.trie.parent >= 0)
        tokens, depth, self._inner, self._parents = (
            torch.from_numpy(values).to(device)
            for values in (self.trie.tokens, self.trie.depth, inner, self.trie.parent[inner])
        )
        self.model_inputs = {
            "input_ids": tokens[None],
            "position_ids": depth[None],
            "attention_mask": None,
            NAME: TrieSegments(self.trie),
        }
        self.temperature = None
        if any(value != 1 for value in temperatures):
            self.temperature = torch.empty(len(self.trie), dtype=torch.float64)
            for nodes, value in zip(places, temperatures, strict=True):
                self.temperature[torch.from_numpy(nodes)] = float(value)
            self.temperature = self.temperature.to(device)
        own, following = (np.concatenate(nodes) for nodes in (node_of, [np.roll(nodes, -1) for nodes in node_of]))
        before = self.trie.parent[following]
        self.own_nodes = torch.from_numpy(np.where(before < 0, own, before)).to(device)
        self.next_nodes = torch.from_numpy(following).to(device)
        self._tokens = tokens[self._inner]

    def scale(self, logits: torch.Tensor) -> torch.Tensor:
        """Return `logits` (N, V) divided by the nodes' temperatures."""
        if self.temperature is None:
            return logits
        return logits / self.temperature.clamp(min=1e-8)[:, None].to(logits.dtype)

    def node_log_probs(self, logits: torch.Tensor) -> torch.Tensor:
        """Return (N,), log p of each node's token under its parent's row of the scaled `logits` (N, V); 0 at roots."""
        chosen = _ChosenLogProbs.apply(logits, self._parents, self._tokens)
        return chosen.new_zeros(len(self.trie)).index_copy(0, self._inner, chosen)


def tree_log_probs(
    model: torch.nn.Module,
    sequences: Sequence[torch.Tensor],
    temperature: float | Sequence[float] = 1.0,
    calculate_entropy: bool = True,
) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
    """Return log-probabilities and entropies of sequences, computing each distinct prefix once; both have gradients.

    They are (T - 1,), of the tokens from the second on, for each sequence of T token ids, a 1-D tensor; entropies are
    in nats, and None without `calculate_entropy`. log p is that of softmax(logits / temperature), one temperature or
    one per sequence. The model is a Qwen2, Qwen3 or Llama of `transformers`. With gradient checkpointing call
    `model.set_attn_implementation("prefix_tree")` first: layers are recomputed after this function returns.
    """
    if not sequences or any(sequence.dim() != 1 or not len(sequence) for sequence in sequences):
        raise ValueError("sequences: expected 1-D tensors of at least one token id")
    device = sequences[0].device
    temperatures = [temperature] * len(sequences) if isinstance(temperature, int | float) else list(temperature)
    rows = [sequences_of_row(sequence.cpu().numpy()) for sequence in sequences]
    batch = TrieBatch(rows, temperatures, device)
    with _attention_of(model):
        logits = batch.scale(model(**batch.model_inputs, use_cache=False).logits[0])
    lengths = [len(sequence) for sequence in sequences]

    def by_sequence(values: torch.Tensor) -> list[torch.Tensor]:
        return [own[:-1] for own in values.split(lengths)]

    log_probs = by_sequence(batch.node_log_probs(logits)[batch.next_nodes])
    if not calculate_entropy:
        return log_probs, None
    log_p = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    # an impossible token adds 0 log 0 = 0; the product of 0 and -inf would be NaN
    entropy = -(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0.0)).sum(-1)
    return log_probs, by_sequence(entropy[batch.own_nodes])


@contextmanager
def _attention_of(model: torch.nn.Module) -> Iterator[None]:
    """Let the model attend on tries within this context, and restore its attention afterwards."""
    check_model_config(model.config.to_dict())
    before = model.config._attn_implementation
    if before != NAME and model.training and getattr(model, "is_gradient_checkpointing", False):
        raise ValueError(
            f'gradient checkpointing recomputes layers after this call: call model.set_attn_implementation("{NAME}") '
            "before it"
        )
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
