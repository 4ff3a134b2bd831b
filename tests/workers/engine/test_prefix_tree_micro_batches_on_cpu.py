"""Micro-batches of the prefix tree: every row once, within the budget of distinct tokens, subtrees whole."""

import inspect
import math
import random
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import torch.nn.attention.varlen
from transformers import AutoConfig, AutoModelForCausalLM
from verl.workers.engine.fsdp import transformer_impl

from tests.workers.engine.tries import random_sequences
from verl.utils import tensordict_utils as tu
from verl.workers.config.prefix_tree import SKIP_ZERO_ADVANTAGES
from verl.workers.engine.prefix_tree import micro_batches
from verl.workers.engine.prefix_tree.attention import VarlenSegments
from verl.workers.engine.prefix_tree.micro_batches import TokenBytes, TrieOrder, prepare_micro_batches
from verl.workers.engine.prefix_tree.trie import build_trie
from verl.workers.rollout.contexts import Context, sequences_of_row
from verl_patches.prefix_tree_engine import MARK


def unique_tokens(rows: list[list[int]]) -> int:
    return len({tuple(row[: end + 1]) for row in rows for end in range(len(row))})


def group(prompt: int, responses: int, prompt_length: int, response_length: int) -> list[list[int]]:
    """Rows that share a prompt and nothing else."""
    stem = [prompt] * prompt_length
    return [stem + [1000 + row] * response_length for row in range(responses)]


def planned(rows: list[list[int]], budget: int, count: int = 1) -> list[list[int]]:
    order = TrieOrder([sequences_of_row(np.array(row)) for row in rows])
    return [order.order[start:end] for start, end in order.at_least(order.runs_within(budget), count)]


@pytest.mark.parametrize("seed", range(5))
def test_every_row_once_and_within_the_budget(seed):
    rng = random.Random(seed)
    for _ in range(40):
        rows = [sequence.tolist() for _ in range(rng.randint(1, 3)) for sequence in random_sequences(rng, tokens=5)]
        budget = rng.randint(max(map(len, rows)), 60)
        count = rng.randint(1, 5)
        batches = planned(rows, budget, count)
        assert sorted(row for batch in batches for row in batch) == list(range(len(rows)))
        assert all(batch and unique_tokens([rows[row] for row in batch]) <= budget for batch in batches)
        assert len(batches) >= min(count, len(rows))
        order = TrieOrder([sequences_of_row(np.array(row)) for row in rows])
        start, end = sorted(rng.sample(range(len(rows) + 1), 2))
        assert order.tokens((start, end)) == unique_tokens([rows[row] for row in order.order[start:end]])


def test_groups_stay_whole_and_share_micro_batches():
    """Five groups of 4 x (6 + 2): 14 distinct tokens each, 32 of rows. Shuffled over the mini-batch."""
    rows = [row for prompt in range(5) for row in group(prompt, 4, 6, 2)]
    random.Random(0).shuffle(rows)
    batches = planned(rows, 31)  # 28 distinct tokens, and 48 gathered keys that are repeated
    assert sorted({rows[row][0] for row in batch}.__len__() for batch in batches) == [1, 2, 2]
    for prompt in range(5):
        assert sum(any(rows[row][0] == prompt for row in batch) for batch in batches) == 1


def test_a_group_over_budget_is_cut_between_its_subtrees():
    """A prompt of 4 and three stems of 4 with three twigs of 2: 4 + 3 (4 + 6) distinct tokens, of which 27 fit: two
    stems have 24, and repeat 48 gathered keys."""
    rows = [[1] * 4 + [10 + stem] * 4 + [100 + twig] * 2 for stem in range(3) for twig in range(3)]
    batches = planned(rows, 27)
    stems = [{rows[row][4] for row in batch} for batch in batches]
    assert sorted(map(len, stems)) == [1, 2] and not set.intersection(*stems)


def test_more_micro_batches_where_another_rank_has_more():
    rows = [row for prompt in range(2) for row in group(prompt, 4, 6, 2)]
    assert [len(batch) for batch in planned(rows, 1000)] == [8]
    assert [len(batch) for batch in planned(rows, 1000, count=2)] == [4, 4]
    assert sorted(len(batch) for batch in planned(rows, 1000, count=3)) == [2, 2, 4]
    assert [len(batch) for batch in planned(rows, 1000, count=99)] == [1] * 8


def test_a_row_over_the_budget_is_refused():
    with pytest.raises(ValueError, match="a row of 9 tokens exceeds the 8 of a micro-batch: raise .*ppo_max_token_len"):
        planned([[1] * 9], 8)


def mini_batch(**settings):
    rows = [torch.tensor(row) for prompt in (5, 3) for row in group(prompt, 2, 3, 2)][::-1]
    interleaved = [rows[0], rows[2], rows[1], rows[3]]
    fields = {"input_ids": torch.nested.as_nested_tensor(interleaved, layout=torch.jagged), "row": torch.arange(4)}
    return tu.get_tensordict(fields, {"temperature": 1.0, **settings})


def test_by_rows():
    data = mini_batch(use_dynamic_bsz=False, micro_batch_size_per_gpu=2)
    batches, indices = prepare_micro_batches(data)
    assert sorted(map(sorted, indices)) == [[0, 2], [1, 3]]
    assert [batch["row"].tolist() for batch in batches] == indices
    assert tu.get_non_tensor_data(data, "use_dynamic_bsz", None) is True  # upstream restores the order with it
    with pytest.raises(ValueError, match="micro_batch_size_per_gpu=3 does not divide 4 rows"):
        prepare_micro_batches(mini_batch(use_dynamic_bsz=False, micro_batch_size_per_gpu=3))


def test_rows_of_other_temperatures_count_for_themselves():
    data = mini_batch(max_token_len_per_gpu=14)
    assert len(prepare_micro_batches(data)[0]) == 1
    data["temperature"] = torch.tensor([1.0, 1.0, 0.5, 0.5])
    assert len(prepare_micro_batches(data)[0]) == 2


@pytest.mark.parametrize(
    ("advantages", "skip", "most", "computed"),
    [
        ([1.0, 0.0, -1.0, 0.0], True, 1, [[0, 2]]),
        ([1.0, 0.0, -1.0, 0.0], True, 2, [[0], [2]]),
        ([0.0, 0.0, 0.0, 0.0], True, 1, [[0]]),
        ([0.0, 0.0, 0.0, 0.0], False, 1, [[0, 2], [1, 3]]),
        # another rank has three micro-batches, and so has this one, with rows that add nothing
        ([0.0, 0.0, 0.0, 1.0], True, 3, [[0], [1], [3]]),
        ([1.0, 1.0, 1.0, 1.0], True, 1, [[0, 2], [1, 3]]),
    ],
)
def test_rows_without_advantages_are_left_out_where_they_add_nothing(monkeypatch, advantages, skip, most, computed):
    monkeypatch.setattr(micro_batches, "_most_over_ranks", lambda number, dp_group: max(number, most))
    data = mini_batch(max_token_len_per_gpu=7, **{SKIP_ZERO_ADVANTAGES: skip})
    rows = [torch.tensor([0.0, value]) for value in advantages]
    data["advantages"] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    batches, indices = prepare_micro_batches(data)
    assert sorted(map(sorted, indices)) == computed
    assert [batch["row"].tolist() for batch in batches] == indices


def test_upstreams_engine_cuts_marked_mini_batches_by_trees():
    assert "prepare_micro_batches(" in inspect.getsource(transformer_impl.FSDPEngine.forward_backward_batch)
    data = mini_batch(use_dynamic_bsz=False, micro_batch_size_per_gpu=2)
    assert [x["row"].tolist() for x in transformer_impl.prepare_micro_batches(data=data)[0]] == [[0, 1], [2, 3]]
    tu.assign_non_tensor(data, **{MARK: True})
    batches, _ = transformer_impl.prepare_micro_batches(data=data, dp_group=None, same_micro_num_in_dp=True)
    assert sorted(sorted(x["row"].tolist()) for x in batches) == [[0, 2], [1, 3]]


def test_gathered_keys_count_against_the_budget():
    """64 rows of 2 tokens behind a prompt of 100: 228 distinct tokens, and 6,528 in all rows."""
    rows = [np.append(np.arange(100), [1000 + row, row]) for row in range(64)]
    order = TrieOrder([sequences_of_row(row) for row in rows])
    assert order.tokens((0, 64)) == 228 and order.gathered((0, 64)) == (64 * 102 + 100, 65)
    assert order.cost((0, 64)) == 228 + (64 * 102 + 100 - 228) // 16
    assert order.cost((0, 1)) == 102  # a row alone gathers nothing beyond its own
    assert len(order.runs_within(228)) > 1 and len(order.runs_within(order.cost((0, 64)))) == 1
    for run in order.runs_within(228):
        assert order.cost(run) <= 228


@contextmanager
def saved_bytes(weights=()):
    """Yield a list with the bytes of each tensor that autograd saves, without the weights; one for each storage."""
    sizes, storages = [], {weight.untyped_storage().data_ptr(): weight for weight in weights}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in storages:
            storages[storage.data_ptr()] = tensor  # kept, so that no later tensor gets its address
            sizes.append(storage.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield sizes


class SavesLikeTheKernel(torch.autograd.Function):
    """A function that saves the inputs that the varlen kernel saves; its result does not matter here."""

    @staticmethod
    def forward(ctx, query, key, value):
        ctx.save_for_backward(key, value)
        return query

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None, None


@pytest.mark.parametrize("seed", range(8))
def test_gathered_keys_are_those_that_attention_saves_on_a_random_trie(seed, monkeypatch):
    monkeypatch.setattr(
        torch.nn.attention.varlen, "varlen_attn", lambda *args, **_: SavesLikeTheKernel.apply(*args[:3])
    )
    rng, heads, kv_heads, head_dim = random.Random(seed), 6, 2, 4
    texts = {tuple(rng.randint(0, 2) for _ in range(rng.randint(1, 8))) for _ in range(12)}
    rows = [np.array([*text, 9]) for text in texts]  # no row is a prefix of another
    order = TrieOrder([sequences_of_row(row) for row in rows])
    start, end = sorted(rng.sample(range(len(rows) + 1), 2))
    trie = build_trie([rows[row] for row in order.order[start:end]])
    query, key, value = (
        torch.randn(len(trie), n, head_dim, dtype=torch.bfloat16, requires_grad=True)
        for n in (heads, kv_heads, kv_heads)
    )
    with saved_bytes() as sizes:
        VarlenSegments(trie, query.device).attend(query, key, value, 1.0)
    gathered, segments = order.gathered((start, end))
    assert segments == len(trie.segment_starts)
    in_bfloat16 = 2 * kv_heads * head_dim * 2
    # each index that a gather keeps is of 8 bytes, and both gathers share them
    assert sum(sizes) == gathered * (in_bfloat16 + 8)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama"])
def test_a_layer_saves_the_bytes_of_the_formula(kind):
    """The difference between models of two layers and of one; Qwen2's and Llama's have no norms of queries and keys."""
    sizes = dict(hidden_size=64, intermediate_size=160, num_attention_heads=4, num_key_value_heads=2, vocab_size=32)
    totals, queries_and_keys = [], (4 + 2) * 16
    for layers in (1, 2):
        config = AutoConfig.for_model(kind, **sizes, num_hidden_layers=layers, head_dim=16)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(torch.bfloat16)
        inputs = torch.randn(1, 256, 64, dtype=torch.bfloat16, requires_grad=True)
        with saved_bytes(model.parameters()) as saved:
            model.model(inputs_embeds=inputs)
        totals.append(sum(saved))
    formula = TokenBytes.of(config).layer - (0 if kind == "qwen3" else 6 * queries_and_keys)
    # beside that: roots of mean squares and log-sum-exps, a few numbers for each head
    assert formula <= (totals[1] - totals[0]) / 256 <= formula + 64


def test_deep_trees_cost_what_their_inner_segments_gather():
    """A 7 B model's sizes: 16 rows of 1,024 tokens fork after each 64, and share most of them."""
    sizes = dict(hidden_size=3584, intermediate_size=18944, num_attention_heads=28, num_key_value_heads=4)
    token_bytes = TokenBytes.of(AutoConfig.for_model("qwen2", **sizes, num_hidden_layers=28, vocab_size=152064))
    rows = [np.append(np.arange(64 * fork), np.full(1024 - 64 * fork, 5000 + fork)) for fork in range(16)]
    order = TrieOrder([sequences_of_row(row) for row in rows], token_bytes=token_bytes)
    gathered, segments = order.gathered((0, 16))
    # inner segments end after 64, 128, … 896 tokens
    assert (gathered, segments) == (16 * 1024 + 64 * 14 * 15 // 2, 30) and order.tokens((0, 16)) == 960 + 64 * 136
    more = (gathered - order.tokens((0, 16))) * (8 * 512 + 4 * 3584) + 30 * 128 * 4 * 3584
    assert order.cost((0, 16)) == order.tokens((0, 16)), "the logits' memory is free again when the layers gather"
    assert more < order.tokens((0, 16)) * (token_bytes.logits - token_bytes.layer)
    kept = 2 * 3584 * 28
    assert token_bytes.tokens(1000, 100_000, 500) == 1000 + math.floor(
        (99_000 * 18_432 + 500 * 1_835_008 - 1000 * (608_256 - token_bytes.layer)) / (kept + 608_256)
    )


def test_a_row_alone_is_a_micro_batch_whatever_its_contexts_repeat():
    contexts = [Context(100 + at, range(90)) for at in range(0, 160, 10)]
    row = sequences_of_row(np.arange(260), contexts)
    order = TrieOrder([row])
    assert order.cost((0, 1)) > order.lengths.max() + 50
    assert order.runs_within(int(order.lengths.max())) == [(0, 1)]
