"""An attention function of `transformers`, named `prefix_tree`, for a trie that is packed into one row.

Each segment's queries attend to the keys and values on their path from the root, which are gathered by index, and
causally to those of their own segment. The trie is passed as the keyword argument `prefix_tree` of the model's forward,
in a plain class of integer tensors, because FSDP2 rebuilds dataclasses and casts the floats in them.

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
# segments share a call if padding adds at most PADDING of their scores plus FREE_PADDING, cheaper than a call
PADDING, FREE_PADDING = 0.25, 4096
MAX_SCORES = 2**22
SUMMED_ROWS = 2**16  # number of a gathered gradient's rows that are converted at a time


class GatherNodes(torch.autograd.Function):
    """The function `states[nodes]`, with a gradient that is summed in float32 even for 16-bit states. Hundreds of
    segments may gather the same node, and a bfloat16 sum of hundreds of terms has only two digits."""

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
        # pieces save memory: a float32 copy of the whole gradient would be twice its size
        for piece, places in zip(rows.split(SUMMED_ROWS), nodes.reshape(-1).split(SUMMED_ROWS), strict=True):
            total.index_add_(0, places, piece.to(dtype))
        return total.to(gradient.dtype), None


class PaddedBatch:
    """Segments of similar lengths, padded to one shape for one call of the attention. The queries of a shorter segment
    are padded with copies of its last query. Keys lie at the index of their depth, so the mask hides the padded keys:
    they are deeper than every query."""

    def __init__(self, trie: Trie, segments: np.ndarray, device: torch.device):
        starts, ends = trie.segment_starts[segments], trie.segment_ends[segments]
        queries = starts[:, None] + np.arange((ends - starts).max())
        queries = np.minimum(queries, ends[:, None] - 1)
        keys = np.zeros((len(segments), trie.depth[ends - 1].max() + 1), dtype=np.int64)
        for row, segment in zip(keys, segments, strict=True):
            path = trie.segment_path(segment)
            row[: len(path)] = path
        self.query_nodes = queries  # (B, L), on the CPU
        self.queries = torch.from_numpy(queries).to(device)
        self.keys = torch.from_numpy(keys).to(device)  # (B, K) nodes, by depth
        self.query_depth = torch.from_numpy(trie.depth[queries]).to(device)  # (B, L)
        # whole sequences of one length need no explicit mask, and causal kernels skip the hidden scores
        self.causal = keys.shape == queries.shape and (trie.depth[queries] == np.arange(keys.shape[1])).all()
        self._mask: torch.Tensor | None = None

    def mask(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the mask (B, 1, L, K): 0 if a key is at most as deep as the query, else -inf. All layers share it."""
        if self._mask is None or self._mask.dtype != dtype:
            hidden = torch.arange(self.keys.shape[1], device=self.keys.device) > self.query_depth[..., None]
            zeros = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            self._mask = zeros.masked_fill_(hidden, float("-inf"))[:, None]
        return self._mask


class PaddedSegments:
    """Attention with `scaled_dot_product_attention`, on any device."""

    def __init__(self, trie: Trie, device: torch.device):
        self.batches = [PaddedBatch(trie, segments, device) for segments in similar_segments(trie)]
        place = np.empty(len(trie), dtype=np.int64)  # index of each node in the queries of all batches
        offset = 0
        for batch in self.batches:
            queries = batch.query_nodes.reshape(-1)
            place[queries] = offset + np.arange(len(queries))
            offset += len(queries)
        self.place = torch.from_numpy(place).to(device)  # (N,)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        outputs = []
        for batch in self.batches:
            path_states = [GatherNodes.apply(states, batch.keys) for states in (key, value)]
            heads_first = [states.transpose(1, 2) for states in (query[batch.queries], *path_states)]
            gqa = query.shape[1] != key.shape[1]
            mask = {"is_causal": True} if batch.causal else {"attn_mask": batch.mask(query.dtype)}
            output = scaled_dot_product_attention(*heads_first, **mask, scale=scale, enable_gqa=gqa)
            outputs.append(output.transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs)[self.place]


class VarlenSegments:
    """Attention with torch's varlen kernel, whose causal mask is aligned to the last query and key; it needs CUDA and
    16-bit floats."""

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
        from torch.nn.attention.varlen import varlen_attn

        offsets = (self.query_offsets, self.key_offsets, self.max_queries, self.max_keys)
        options = {"window_size": (-1, 0), "scale": scale}
        # torch 2.11 accepts fewer key heads than query heads without this option, 2.12 only with it
        if query.shape[1] != key.shape[1] and "enable_gqa" in inspect.signature(varlen_attn).parameters:
            options["enable_gqa"] = True
        path_states = [GatherNodes.apply(states, self.keys) for states in (key, value)]
        return varlen_attn(query, *path_states, *offsets, **options)


class TrieSegments:
    """The `prefix_tree` argument of a forward over a trie; the first layer's tensors decide the kind of attention."""

    def __init__(self, trie: Trie):
        self._trie = trie
        self._segments: PaddedSegments | VarlenSegments | None = None

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        """Return the attention output (N, H, D) for `query` (N, H, D), `key` and `value` (N, G, D)."""
        if self._segments is None:
            by_kernel = query.is_cuda and query.dtype in (torch.float16, torch.bfloat16)
            self._segments = (VarlenSegments if by_kernel else PaddedSegments)(self._trie, query.device)
        return self._segments.attend(query, key, value, scale)


def similar_segments(trie: Trie) -> Iterator[np.ndarray]:
    """Yield batches of segment indices; the lengths in a batch differ so little that padding is cheap."""
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
    """Return the output (1, N, H, D), and None as weights, for `query` (1, H, N, D), `key` and `value` (1, G, N, D)."""
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
