"""Tests of row order: padding rows are spread and weigh nothing; groups stay whole where shared tokens count once."""

import random

import pytest
import torch
from verl.workers.utils.losses import ppo_loss

from verl.trainer.ppo import padding_utils
from verl.trainer.ppo.v1.row_order import check_updates, distinct_tokens, place_groups, spread_padding_rows
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPActorConfig
from verl.workers.rollout.contexts import CONTEXTS
from verl_patches.short_padding_rows import shorten_padding_rows


@pytest.fixture
def shortened(monkeypatch):
    monkeypatch.setattr(padding_utils, "SYNTHETIC_PADDING_SEQ_LEN", 128)
    shorten_padding_rows()


def padding_row() -> tuple[dict, dict]:
    source = {"prompts": torch.arange(7), "responses": torch.arange(5), "position_ids": torch.arange(12)}
    return padding_utils.construct_minimal_padding_template(source, {"status": "success"}, eos_token_id=2)


@pytest.mark.parametrize("seed", range(200))
def test_every_mini_batch_has_as_many_padding_rows_give_or_take_one(seed):
    rng = random.Random(seed)
    n_ranks, n_mini_batches, size = rng.randint(1, 4), rng.randint(1, 5), rng.randint(1, 6)
    n = n_ranks * n_mini_batches * size
    # upstream fills up to the next multiple of a mini-batch
    padding_rows = set(rng.sample(range(n), rng.randint(0, n_ranks * size - 1)))
    order = spread_padding_rows([row in padding_rows for row in range(n)], n_ranks, n_mini_batches)
    counts = [0] * n_mini_batches
    for rank in range(n_ranks):
        of_rank = range(rank * n // n_ranks, (rank + 1) * n // n_ranks)
        own = order[of_rank.start : of_rank.stop]
        assert sorted(own) == list(of_rank), "rows stay on their ranks"
        assert [row for row in own if row not in padding_rows] == sorted({*own} - padding_rows), "and in their order"
        for place, row in enumerate(own):
            counts[place // size] += row in padding_rows
    assert max(counts) - min(counts) <= 1 and max(counts) < n_ranks * size, "none has nothing else"


def test_fewer_trajectories_than_updates_are_an_error():
    with pytest.raises(ValueError, match="1 trajectories for 2 updates"):
        check_updates(1, 2)


TERMS = ("old_log_probs", "ref_log_prob", "advantages")


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_the_loss_and_its_metrics_do_not_see_padding_rows(shortened, mode):
    """Upstream's loss with entropy and KL terms, of two rows, and of the same with three padding rows."""
    config = FSDPActorConfig(
        strategy="fsdp2", rollout_n=2, use_dynamic_bsz=True, loss_agg_mode=mode, use_kl_loss=True, entropy_coeff=0.1
    )
    generator = torch.Generator().manual_seed(0)
    rows = []
    for length in (3, 5):
        terms = {name: -torch.rand(length, generator=generator) for name in TERMS}
        ones = {"prompts": torch.ones(2), "responses": torch.ones(length), "response_mask": torch.ones(length)}
        rows.append(ones | terms)
    made, _ = padding_row()
    same = {name: made[name].float() for name in ("prompts", "responses", "response_mask")}
    padding_rows = [same | {name: torch.zeros(1) for name in TERMS}] * 3
    (loss, metrics), (filled, of_filled) = loss_of(config, rows), loss_of(config, rows + padding_rows)
    assert filled == pytest.approx(loss, rel=1e-6) and loss != 0
    assert of_filled == pytest.approx(metrics, rel=1e-5) and metrics["actor/entropy_loss"] > 0


def loss_of(config, rows: list[dict]) -> tuple[float, dict[str, float]]:
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    nested = {name: torch.nested.as_nested_tensor(column, layout=torch.jagged) for name, column in columns.items()}
    data = tu.get_tensordict(nested, {"dp_size": 1, "batch_num_tokens": 8, "global_batch_size": 2})
    generator, lengths = torch.Generator().manual_seed(1), [len(row["prompts"]) + len(row["responses"]) for row in rows]
    flat = [torch.rand(length, generator=generator) for length in lengths]
    output = torch.nested.as_nested_tensor(flat, layout=torch.jagged)
    loss, metrics = ppo_loss(config, {"log_probs": -output, "entropy": output}, data)
    return loss.item(), {name: float(getattr(metric, "values", [metric])[0]) for name, metric in metrics.items()}


# ---- groups ----


def parts_of(order: list[int], n_parts: int) -> list[list[int]]:
    size = len(order) // n_parts
    return [order[start : start + size] for start in range(0, len(order), size)]


@pytest.mark.parametrize("seed", range(100))
def test_groups_of_one_size_stay_whole_and_ranks_are_even(seed):
    rng = random.Random(seed)
    n, n_ranks, n_mini_batches, per_part = rng.randint(1, 5), rng.randint(1, 4), rng.randint(1, 3), rng.randint(1, 6)
    n_parts = n_ranks * n_mini_batches
    groups = [list(range(start, start + n)) for start in range(0, n_parts * per_part * n, n)]
    tokens = [rng.randint(1, 100) for _ in groups]
    order = place_groups(groups, tokens, [], n_ranks, n_mini_batches)
    assert sorted(order) == list(range(len(order)))
    loads = []
    for part in parts_of(order, n_parts):
        whole = {row // n for row in part}
        assert len(whole) == per_part and sorted(part) == sorted(row for group in whole for row in groups[group])
        loads.append(sum(tokens[group] for group in whole))
    if per_part > 1:
        assert max(loads) - min(loads) <= max(tokens) * (1 if per_part > 2 else 2)


@pytest.mark.parametrize("seed", range(100))
def test_groups_of_any_size_and_padding_rows(seed):
    rng = random.Random(seed)
    n_ranks, n_mini_batches, size = rng.randint(1, 3), rng.randint(1, 3), rng.randint(1, 9)
    n_rows = n_ranks * n_mini_batches * size
    rows = list(range(n_rows))
    padding_rows = sorted(rng.sample(rows, rng.randint(0, n_ranks * size - 1)))
    real = [row for row in rows if row not in padding_rows]
    groups: list[list[int]] = []
    while real:
        length = rng.randint(1, 6)
        groups.append(real[:length])
        real = real[length:]
    order = place_groups(groups, [len(group) for group in groups], padding_rows, n_ranks, n_mini_batches)
    assert sorted(order) == rows
    parts = parts_of(order, n_ranks * n_mini_batches)
    mini_batches = [sum(parts[number::n_mini_batches], []) for number in range(n_mini_batches)]
    of_mini_batch = [sum(row in padding_rows for row in mini_batch) for mini_batch in mini_batches]
    assert max(of_mini_batch) - min(of_mini_batch) <= 1
    place = {row: number for number, part in enumerate(parts) for row in part}
    cut = sum(len({place[row] for row in group}) - 1 for group in groups)
    assert cut <= len(parts) - 1  # each part but one is filled up by a cut group at most


class Rows:
    """Stands for `BatchRows`: a prompt of five tokens, responses of three, four and four."""

    tags = [{"prompt_len": 5, "response_len": length} for length in (3, 4, 4)]

    def __init__(self, segments: list[list[int]] | None):
        self.segments = segments

    def column(self, name: str, chosen: list[int]):
        if name == CONTEXTS:
            return None
        return None if self.segments is None else [torch.tensor(self.segments[row]) for row in chosen]


def test_distinct_tokens_by_hand():
    """Rows 0 and 1 share two tokens, row 2 shares none."""
    rows = Rows([[0, 0, 1], [0, 0, 2, 2], [3, 3, 3, 3]])
    assert distinct_tokens(rows, [0, 1]) == 5 + 2 + 1 + 2
    assert distinct_tokens(rows, [0, 1, 2]) == 5 + 2 + 1 + 2 + 4
    assert distinct_tokens(Rows(None), [0, 1, 2]) == 5 + 3 + 4 + 4
