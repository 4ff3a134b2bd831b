"""Attention on a trie that is packed into one row, as an attention function of `transformers` named `prefix_tree`.

Each segment's queries attend to the keys and values on their path from the root, which are gathered by index, and
causally to their own. What this needs travels as the keyword argument `prefix_tree` of the model's forward; it is a
plain class of integer tensors, because FSDP2 rebuilds dataclasses and casts the floats in them.

Shapes: N nodes, B segments in a batch, L queries, K keys, H query heads, G key and value heads, D per head.
"""

import inspect
from collections.abc import Iterator

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from verl.workers.engine.prefix_tree.trie import Trie

NAME = "prefix_tree"
# segments share a call where padding adds at most so much of the scores, or so few scores that a call costs more
PADDING, FREE_PADDING = 0.25, 4096
MAX_SCORES = 2**22
SUMMED_ROWS = 2**16  # of a gathered gradient that are converted at a time


class GatherNodes(torch.autograd.Function):
    """`states[nodes]` whose gradient is summed in float32, also where the states have 16 bits.

    Hundreds of segments may gather the same node. In bfloat16 a sum of hundreds of terms would keep two digits.
    """

    @staticmethod
    def forward(ctx, states: torch.Tensor, nodes: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(nodes)
        ctx.shape = states.shape
        return states[nodes]

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (nodes,) = ctx.saved_tensors
        dtype = torch.promote_types(gradient.dtype, torch.float32)
        total = torch.zeros(ctx.shape, dtype=dtype, device=gradient.device)
        rows = gradient.reshape(-1, *ctx.shape[1:])
        # in pieces, as the float32 copy of a whole gradient would double its memory
        for piece, places in zip(rows.split(SUMMED_ROWS), nodes.reshape(-1).split(SUMMED_ROWS), strict=True):
            total.index_add_(0, places, piece.to(dtype))
        return total.to(gradient.dtype), None


class PaddedBatch:
    """Segments of similar lengths in one call; a padded query repeats the segment's last, a padded key is masked."""

    def __init__(self, trie: Trie, segments: np.ndarray, device: torch.device):
        starts, ends = trie.segment_starts[segments], trie.segment_ends[segments]
        queries = starts[:, None] + np.arange((ends - starts).max())
        queries = np.minimum(queries, ends[:, None] - 1)
        keys = np.zeros((len(segments), trie.depth[ends - 1].max() + 1), dtype=np.int64)
        for row, segment in zip(keys, segments, strict=True):
            path = trie.segment_path(segment)
            row[: len(path)] = path
        self.queries = torch.from_numpy(queries).to(device)  # (B, L) nodes
        self.keys = torch.from_numpy(keys).to(device)  # (B, K) nodes, by depth
        self.query_depth = torch.from_numpy(trie.depth[queries]).to(device)  # (B, L)
        # whole sequences of one length need no mask, and kernels for these skip what is hidden
        self.causal = keys.shape == queries.shape and (trie.depth[queries] == np.arange(keys.shape[1])).all()
        self._mask: torch.Tensor | None = None

    def mask(self, dtype: torch.dtype) -> torch.Tensor:
        """(B, 1, L, K), 0 where the key is no deeper than the query, else -inf. All layers share it."""
        if self._mask is None or self._mask.dtype != dtype:
            hidden = torch.arange(self.keys.shape[1], device=self.keys.device) > self.query_depth[..., None]
            zeros = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            self._mask = zeros.masked_fill_(hidden, float("-inf"))[:, None]
        return self._mask


class PaddedSegments:
    """Attention with `scaled_dot_product_attention`, on any device."""

    def __init__(self, trie: Trie, device: torch.device):
        self.batches = [PaddedBatch(trie, segments, device) for segments in similar_segments(trie)]
        place = np.empty(len(trie), dtype=np.int64)  # of each node among all batches' queries
        offset = 0
        for batch in self.batches:
            queries = batch.queries.cpu().numpy().reshape(-1)
            place[queries] = offset + np.arange(len(queries))
            offset += len(queries)
        self.place = torch.from_numpy(place).to(device)  # (N,)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        """`query` (N, H, D), `key` and `value` (N, G, D); returns (N, H, D)."""
        outputs = []
        for batch in self.batches:
            of_path = [GatherNodes.apply(states, batch.keys) for states in (key, value)]
            heads_first = [states.transpose(1, 2) for states in (query[batch.queries], *of_path)]
            gqa = query.shape[1] != key.shape[1]
            mask = {"is_causal": True} if batch.causal else {"attn_mask": batch.mask(query.dtype)}
            output = scaled_dot_product_attention(*heads_first, **mask, scale=scale, enable_gqa=gqa)
            outputs.append(output.transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs)[self.place]


class VarlenSegments:
    """Attention with torch's varlen kernel, whose causal mask is aligned to the last query and key.

    It needs CUDA and 16-bit floats.
    """

    def __init__(self, trie: Trie, device: torch.device):
        query_lengths = trie.segment_ends - trie.segment_starts
        key_lengths = trie.depth[trie.segment_ends - 1] + 1
        paths = [trie.segment_path(segment) for segment in range(len(query_lengths))]
        self.keys = torch.from_numpy(np.concatenate(paths)).to(device)
        self.query_offsets, self.key_offsets = (
            torch.from_numpy(np.append(0, np.cumsum(lengths)).astype(np.int32)).to(device)
            for lengths in (query_lengths, key_lengths)
        )
        self.max_queries, self.max_keys = int(query_lengths.max()), int(key_lengths.max())

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        """`query` (N, H, D), `key` and `value` (N, G, D); returns (N, H, D). Segments are the nodes' own order."""
        from torch.nn.attention.varlen import varlen_attn

        offsets = (self.query_offsets, self.key_offsets, self.max_queries, self.max_keys)
        options = {"window_size": (-1, 0), "scale": scale}
        # torch 2.11 takes fewer key heads than query heads without being told, 2.12 only when told
        if query.shape[1] != key.shape[1] and "enable_gqa" in inspect.signature(varlen_attn).parameters:
            options["enable_gqa"] = True
        of_path = [GatherNodes.apply(states, self.keys) for states in (key, value)]
        return varlen_attn(query, *of_path, *offsets, **options)


class TrieSegments:
    """What a forward over a trie passes as `prefix_tree`; the first layer's tensors tell which attention serves."""

    def __init__(self, trie: Trie):
        self._trie = trie
        self._segments: PaddedSegments | VarlenSegments | None = None

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        """`query` (N, H, D), `key` and `value` (N, G, D); returns (N, H, D)."""
        if self._segments is None:
            by_kernel = query.is_cuda and query.dtype in (torch.float16, torch.bfloat16)
            self._segments = (VarlenSegments if by_kernel else PaddedSegments)(self._trie, query.device)
        return self._segments.attend(query, key, value, scale)


def similar_segments(trie: Trie) -> Iterator[np.ndarray]:
    """Indices of segments in batches whose lengths differ so little that padding is cheap."""
    queries = trie.segment_ends - trie.segment_starts
    keys = trie.depth[trie.segment_ends - 1] + 1
    batch: list[int] = []
    most_queries = scores = 0
    for segment in np.lexsort((queries, keys)):
        widest, own = max(most_queries, queries[segment]), queries[segment] * keys[segment]
        padded = (len(batch) + 1) * widest * keys[segment]  # keys ascend
        if batch and (padded > (1 + PADDING) * (scores + own) + FREE_PADDING or padded > MAX_SCORES):
            yield np.array(batch)
            batch, widest, scores = [], queries[segment], 0
        batch.append(segment)
        most_queries, scores = widest, scores + own
    if batch:
        yield np.array(batch)


def prefix_tree_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    prefix_tree: TrieSegments | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Return (1, N, H, D), and no weights, for `query` (1, H, N, D), `key` and `value` (1, G, N, D).

    Raises:
        ValueError: the forward has no trie, or the model has dropout or a sliding window.
    """
    if prefix_tree is None:
        raise ValueError(f"attention {NAME!r} needs the keyword argument prefix_tree of the model's forward")
    if dropout or sliding_window is not None:
        raise ValueError(f"attention {NAME!r} knows no {'dropout' if dropout else 'sliding window'}")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    device = query.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype
    states = (states[0].transpose(0, 1).to(dtype) for states in (query, key, value))
    return prefix_tree.attend(*states, scale)[None], None


ALL_ATTENTION_FUNCTIONS.register(NAME, prefix_tree_attention)
