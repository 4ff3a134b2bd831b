"""`tree_log_probs` against a forward per sequence: log-probabilities, entropies and gradients of random tries."""

import random
from unittest.mock import patch

import numpy as np
import pytest
import torch

from tests.workers.engine.tries import VOCABULARY, random_sequences, row_log_probs, tiny_model
from verl.workers.engine.prefix_tree import tree_log_probs
from verl.workers.engine.prefix_tree.attention import (
    NAME,
    PaddedSegments,
    TrieSegments,
    VarlenSegments,
    similar_segments,
)
from verl.workers.engine.prefix_tree.log_probs import _ChosenLogProbs
from verl.workers.engine.prefix_tree.trie import build_trie

KINDS = ["qwen2", "qwen3", "llama"]
HEADS = [{"kv_heads": 1, "tied": False}, {"kv_heads": 4, "tied": False}]


@pytest.fixture(autouse=True)
def one_thread():
    """Threads cost more than they save on tensors this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def results(model, sequences, temperatures, by_tree: bool) -> tuple[list, list, torch.Tensor]:
    """Log-probabilities, entropies, and the gradient of a random loss of both, flat."""
    model.zero_grad()
    if by_tree:
        log_probs, entropies = tree_log_probs(model, sequences, temperatures)
    else:
        rows = [row_log_probs(model, *pair) for pair in zip(sequences, temperatures, strict=True)]
        log_probs, entropies = zip(*rows, strict=True)
    generator = torch.Generator().manual_seed(0)
    loss = 0
    for values in (*log_probs, *entropies):
        loss = loss + (torch.randn(len(values), generator=generator, dtype=torch.float64) * values).sum()
    loss.backward()
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    return [x.detach() for x in log_probs], [x.detach() for x in entropies], gradient.clone()


def errors(model, sequences, temperatures) -> tuple[float, float]:
    """The largest difference of a value, and the gradients' difference relative to their norm."""
    rows, tree = (results(model, sequences, temperatures, by_tree) for by_tree in (False, True))
    value_errors = [0.0]
    for of_rows, of_tree in zip(rows[:2], tree[:2], strict=True):
        for a, b in zip(of_rows, of_tree, strict=True):
            assert a.shape == b.shape
            value_errors.extend((a - b).abs().tolist())
    return max(value_errors), ((rows[2] - tree[2]).norm() / rows[2].norm()).item()


@pytest.mark.parametrize(("kind", "heads"), [*((kind, {}) for kind in KINDS), *(("qwen2", each) for each in HEADS)])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-8), (torch.float32, 1e-5)])
def test_exact_on_random_tries(kind, heads, dtype, tolerance):
    model, rng = tiny_model(kind, dtype, **heads), random.Random(kind)
    for _ in range(5):
        sequences = random_sequences(rng, tokens=rng.choice([2, VOCABULARY]))
        if sum(map(len, sequences)) == len(sequences):
            continue  # single tokens only: no log-probability
        temperatures = [rng.choice([1.0, 0.7]) for _ in sequences] if rng.random() < 0.5 else [1.0] * len(sequences)
        value_error, gradient_error = errors(model, sequences, temperatures)
        assert value_error < tolerance
        assert gradient_error < 1e-5


def test_gradient_checkpointing():
    model = tiny_model("qwen2").train()
    sequences = random_sequences(random.Random(2))
    temperatures = [1.0] * len(sequences)
    _, _, expected = results(model, sequences, temperatures, by_tree=True)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with pytest.raises(ValueError, match='set_attn_implementation\\("prefix_tree"\\)'):
        tree_log_probs(model, sequences)
    model.set_attn_implementation(NAME)
    recomputed = 0
    attend = PaddedSegments.attend

    def counted(self, *args):
        nonlocal recomputed
        recomputed += 1
        return attend(self, *args)

    with patch.object(PaddedSegments, "attend", counted):
        _, _, gradient = results(model, sequences, temperatures, by_tree=True)
    assert recomputed == 2 * model.config.num_hidden_layers
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6)


def varlen_by_the_textbook(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
    """torch 2.11's varlen_attn: causal where `window_size` is (-1, 0), aligned to each part's last query and key."""
    assert window_size == (-1, 0) and cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert max_q == cu_seq_q.diff().max() and max_k == cu_seq_k.diff().max()
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    queries = query.tensor_split(cu_seq_q[1:-1].long())
    keys, values = (states.tensor_split(cu_seq_k[1:-1].long()) for states in (key, value))
    parts = []
    for q, k, v in zip(queries, keys, values, strict=True):
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        future = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1 + len(k) - len(q))
        parts.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -torch.inf).softmax(-1), v))
    return torch.cat(parts)


def varlen_that_is_told(query, key, value, *offsets, enable_gqa=False, **options):
    """torch 2.12's varlen_attn, which refuses fewer key heads than query heads without `enable_gqa`."""
    assert enable_gqa == (query.shape[1] != key.shape[1])
    return varlen_by_the_textbook(query, key, value, *offsets, **options)


@pytest.mark.parametrize("kernel", [varlen_by_the_textbook, varlen_that_is_told])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_the_arguments_of_the_gpus_kernel(kernel, kv_heads):
    """A stand-in computes what the kernel's documentation says: the kernel itself needs a GPU."""
    model, rng = tiny_model("qwen2", torch.float64, kv_heads=kv_heads), random.Random(5)
    with (
        patch("torch.nn.attention.varlen.varlen_attn", kernel),
        patch("verl.workers.engine.prefix_tree.attention.PaddedSegments", VarlenSegments),
    ):
        for _ in range(4):
            sequences = random_sequences(rng)
            value_error, gradient_error = errors(model, sequences, [1.0] * len(sequences))
            assert value_error < 1e-8 and gradient_error < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_as_good_as_rows(kind):
    """Mean error of log-probabilities against float32 rows, over all sequences: at most 1.5 times the rows' own."""
    model, rng = tiny_model(kind), random.Random(3)
    batches = [random_sequences(rng) for _ in range(4)]
    with torch.no_grad():
        exact = [row_log_probs(model, sequence)[0] for batch in batches for sequence in batch]
        model.bfloat16()
        rows = [row_log_probs(model, sequence)[0] for batch in batches for sequence in batch]
        tree = [values for batch in batches for values in tree_log_probs(model, batch)[0]]
    error_of_rows, error_of_tree = ((torch.cat(exact) - torch.cat(x)).abs().mean() for x in (rows, tree))
    assert 0 < error_of_tree <= 1.5 * error_of_rows


def test_shared_tokens_go_through_the_model_once():
    model = tiny_model("qwen2")
    sequences = [torch.tensor([1, 2, 3, 4, 5]), torch.tensor([1, 2, 3, 6]), torch.tensor([1, 2, 3, 4, 5])]
    rows = []
    model.lm_head.register_forward_pre_hook(lambda _, inputs: rows.append(inputs[0].shape[1]))
    tree_log_probs(model, sequences)
    tree_log_probs(model, sequences, temperature=[1.0, 0.5, 1.0])
    assert rows == [6, 9]


def test_the_model_attends_as_before_the_call():
    model = tiny_model("llama")
    before = model(torch.tensor([[1, 2, 3]])).logits
    log_probs, entropies = tree_log_probs(model, [torch.tensor([1, 2, 3])], calculate_entropy=False)
    assert entropies is None and log_probs[0].shape == (2,)
    with pytest.raises(RuntimeError), patch.object(PaddedSegments, "attend", side_effect=RuntimeError):
        tree_log_probs(model, [torch.tensor([1, 2, 3])])
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(model(torch.tensor([[1, 2, 3]])).logits, before)


def test_other_sequences_models_and_forwards_are_refused():
    model, other = tiny_model("llama"), tiny_model("qwen2")
    for sequences in ([], [torch.tensor([[1, 2]])], [torch.tensor([1]), torch.tensor([])]):
        with pytest.raises(ValueError, match="expected 1-D tensors of at least one token id"):
            tree_log_probs(model, sequences)
    model.set_attn_implementation(NAME)
    with pytest.raises(ValueError, match="needs the keyword argument prefix_tree"):
        model(torch.tensor([[1, 2, 3]]))
    other.config.layer_types[1] = "sliding_attention"
    for unfit, message in (
        (other, "sliding window"),
        (tiny_model("mistral"), "type mistral: expected qwen2, qwen3, llama"),
    ):
        with pytest.raises(ValueError, match=message):
            tree_log_probs(unfit, [torch.tensor([1, 2])])


def test_chosen_log_probs_by_finite_differences():
    logits = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    rows, tokens = torch.tensor([0, 0, 2, 3]), torch.tensor([1, 4, 4, 0])
    assert torch.autograd.gradcheck(lambda x: _ChosenLogProbs.apply(x, rows, tokens), (logits,))
    with patch("verl.workers.engine.prefix_tree.log_probs.CHUNK_ELEMENTS", 7):
        assert torch.autograd.gradcheck(lambda x: _ChosenLogProbs.apply(x, rows, tokens), (logits,))


@pytest.mark.parametrize("scale", [1.0, 20.0])  # unsure tokens, and tokens with p close to 1
def test_gradients_of_likely_tokens_in_bfloat16(scale):
    generator = torch.Generator().manual_seed(0)
    exact = (scale * torch.randn(64, 50, generator=generator)).bfloat16().double().requires_grad_()
    rows, tokens = torch.arange(64), exact.argmax(-1)
    weights = torch.randn(64, generator=generator)
    logits = exact.detach().bfloat16().requires_grad_()
    (exact.log_softmax(-1)[rows, tokens] * weights).sum().backward()
    (_ChosenLogProbs.apply(logits, rows, tokens) * weights).sum().backward()
    assert (logits.grad.double() - exact.grad).norm() < 0.005 * exact.grad.norm()


def test_small_segments_share_calls():
    """A comb: a stem of 200 tokens with a twig of one token at each of them."""
    stem = np.arange(200)
    trie = build_trie([np.append(stem[: end + 1], 1000) for end in range(200)])
    batches = list(similar_segments(trie))
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(trie.segment_starts)))
    assert len(batches) < len(trie.segment_starts) / 10
    lengths = trie.depth[trie.segment_ends - 1] + 1
    for batch in batches:
        assert len(batch) * lengths[batch].max() <= 1.25 * lengths[batch].sum() + 4096


def test_gradients_in_bfloat16_of_tokens_that_hundreds_share():
    """Summed in bfloat16 they have seven times the error of independent rows. The loss is a random sum over the
    attention outputs of the sequences' own tokens, and the gradients are those of the shared prompt's keys and values.
    """
    sharers, n_prompt, n_own, size = 512, 8, 2, 16
    own = np.arange(sharers * n_own).reshape(sharers, n_own) + 100
    trie = build_trie([np.append(np.arange(n_prompt), tokens) for tokens in own])
    nodes = torch.from_numpy(np.stack(trie.node_of))  # (sharers, prompt + own)
    generator = torch.Generator().manual_seed(0)

    def random_numbers(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator).bfloat16().double()

    states = [random_numbers(len(trie), heads, size) for heads in (4, 2, 2)]
    weights = random_numbers(sharers, n_own, 4, size)

    def rows(dtype: torch.dtype, *leaves: torch.Tensor) -> torch.Tensor:
        heads_first = (leaf[nodes].to(dtype).transpose(1, 2) for leaf in leaves)  # the sum over rows is in float64
        output = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
        return output.transpose(1, 2)[:, n_prompt:]

    def tree(dtype: torch.dtype, *leaves: torch.Tensor) -> torch.Tensor:
        return TrieSegments(trie).attend(*(leaf.to(dtype) for leaf in leaves), size**-0.5)[nodes[:, n_prompt:]]

    def gradients(attend, dtype: torch.dtype) -> torch.Tensor:
        leaves = [state.clone().requires_grad_() for state in states]
        (attend(dtype, *leaves).double() * weights).sum().backward()
        return torch.stack([leaf.grad[nodes[0, :n_prompt]] for leaf in leaves[1:]])

    exact = gradients(rows, torch.float64)
    ways = [(tree, torch.float64), (rows, torch.bfloat16), (tree, torch.bfloat16)]
    of_tree, of_rows_rounded, of_tree_rounded = (float((gradients(*way) - exact).norm() / exact.norm()) for way in ways)
    assert of_tree < 1e-12 and of_rows_rounded < 0.01 and of_tree_rounded < 1.5 * of_rows_rounded


def test_impossible_tokens_have_no_part_in_the_entropy_and_no_gradient():
    """A model whose last token is impossible is one without this token: by the entropy of the others."""
    model = tiny_model("qwen2", torch.float64, tied=False)

    def forbid_last(module, inputs, logits):
        return torch.cat([logits[..., :-1], torch.full_like(logits[..., -1:], -torch.inf)], dim=-1)

    model.lm_head.register_forward_hook(forbid_last)
    sequences = random_sequences(random.Random(2), tokens=VOCABULARY - 1)
    log_probs, entropies = tree_log_probs(model, sequences)
    torch.cat([*log_probs, *entropies]).sum().backward()
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in model.parameters())
    for sequence, entropy in zip(sequences, entropies, strict=True):
        possible = model(sequence[None]).logits[0, :-1, :-1].softmax(-1)
        assert torch.allclose(entropy, torch.special.entr(possible).sum(-1), atol=1e-10)
