"""Tests that hold for every credit, whatever its rule: on random trees with tools' tokens, by the run's own config.

    from tests.conformance.credits import *  # noqa: F403

    @pytest.fixture(params=["my_credit"])  # names of registered credits
    def credit(request):
        return request.param

A fixture `values_of_fields` may say how token fields that no trainer computes are drawn; else they have `unsent`.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.core_algos import get_adv_estimator_fn

from tests.configs import composed, copied
from tests.trainer.ppo.credit.random_trees import random_batch
from verl.trainer.checks.parts import check_parts, check_typed_sections
from verl.trainer.ppo.v1.component import components_of
from verl.utils.parts import Compares, nested, parts
from verl.utils.token_fields import FIELDS
from verl.workers.rollout.trajectory_tree import SEGMENT_IDS

SEEDS = range(3)
UPSTREAM = "verl.trainer.ppo.core_algos"


@pytest.fixture
def values_of_fields() -> Mapping[str, Callable]:
    """Name of a token field -> function (batch, generator) that draws it, (B, T)."""
    return {}


class Batch(NamedTuple):
    """Rows of some prompts, B; tensors are (B, T)."""

    rewards: torch.Tensor  # the outcome on the last token of each row, which a tool may have written
    mask: torch.Tensor
    index: np.ndarray  # (B,) prompts
    entropy: torch.Tensor  # the old policy's entropies, from which the trainer computes fields over the whole batch
    fields: dict[str, torch.Tensor]  # the other token fields, and numbers of the reward function (B,), by name

    def rows(self, at) -> "Batch":
        fields = {name: values[at] for name, values in self.fields.items()}
        return Batch(self.rewards[at], self.mask[at], self.index[at], self.entropy[at], fields)

    def with_outcomes(self, outcomes) -> "Batch":
        """Return the batch as if each row had this outcome; what the reward function says beside it follows."""
        last = self.fields[SEGMENT_IDS.name].ge(0).sum(-1, keepdim=True) - 1
        outcomes = torch.as_tensor(outcomes, dtype=torch.float64).expand(len(last))
        rewards = torch.zeros_like(self.rewards).scatter(-1, last, outcomes.unsqueeze(-1))
        numbers = {name: (outcomes > 0.5).double() for name, values in self.fields.items() if values.dim() == 1}
        return self._replace(rewards=rewards, fields=self.fields | numbers)


def batch_of(credit: str, seed: int, values_of_fields: Mapping[str, Callable] | None = None) -> Batch:
    drawn, part = random_batch(seed), parts("credit")[credit]
    generator = torch.Generator().manual_seed(seed)
    fields = {SEGMENT_IDS.name: drawn.segment_ids}
    index = np.array([f"prompt {number}" for number in drawn.index], dtype=object)
    entropy = torch.rand(drawn.mask.shape, generator=generator, dtype=torch.float64) + 0.1
    batch = Batch(torch.zeros_like(drawn.mask), drawn.mask, index, entropy, fields)
    for need in part.needs:
        if need.compute is None and need is not SEGMENT_IDS:
            draw = (values_of_fields or {}).get(need.name)
            fields[need.name] = draw(batch, generator) if draw else torch.full(drawn.mask.shape, need.unsent)
    fields |= {number.name: torch.zeros(len(drawn.rows)) for number in part.reward_fields}
    return batch.with_outcomes(drawn.outcomes)


@cache
def run_config(credit: str) -> DictConfig:
    """A run's config with the credit's smallest settings."""
    config = composed("explore", "hardware=cpu", f"credit={credit}")
    OmegaConf.set_struct(config, False)
    config.merge_with(nested(parts("credit")[credit].smallest))
    return config


def advantages(credit: str, batch: Batch, without: str = "", **keys: Any) -> torch.Tensor:
    """(B, T), with everything bound that the trainer binds, but for the field `without`; `keys` that the credit has."""
    config, part = copied(run_config(credit)), parts("credit")[credit]
    for key in keys.keys() & asdict(part.keys()).keys() if part.keys else ():
        config.algorithm[credit][key] = keys[key]
    known = FIELDS | {number.name: number for number in part.reward_fields}
    computed = {need.name: need.compute for need in part.needs if need.compute is not None}
    fields = {name: compute(batch.entropy, batch.mask.bool())[0] for name, compute in computed.items()}
    with ExitStack() as stack:
        for name, values in {**batch.fields, **fields}.items():
            if name != without:
                stack.enter_context(known[name].bound(values))
        for component in components_of(config):
            for context_value, value in component.context_values().items():
                stack.enter_context(context_value.bound(value))
        estimator = get_adv_estimator_fn(config.algorithm.adv_estimator)
        result, returns = estimator(batch.rewards, batch.mask, index=batch.index, config=config.algorithm)
    assert torch.equal(result, returns) and result.shape == batch.mask.shape and not result.requires_grad
    return result


def assert_equal(result: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(result.double(), expected.double(), rtol=1e-5, atol=1e-6)


# ---- numbers ----


@pytest.mark.parametrize("seed", SEEDS)
def test_advantages_are_finite_and_0_outside_the_mask(credit, values_of_fields, seed):
    batch = batch_of(credit, seed, values_of_fields)
    result = advantages(credit, batch)
    assert result.isfinite().all() and result.any() and not result[batch.mask == 0].any()


@pytest.mark.parametrize("seed", SEEDS)
def test_the_order_of_the_rows_only_permutes_the_advantages(credit, values_of_fields, seed):
    """A token that rows share may be trained in the first of them: its advantages are added."""
    batch = batch_of(credit, seed, values_of_fields)
    order = torch.randperm(len(batch.index), generator=torch.Generator().manual_seed(seed))
    result, expected = advantages(credit, batch.rows(order)), advantages(credit, batch)[order]
    assert_equal(*(sums_of_shared_tokens(batch.rows(order), values) for values in (result, expected)))


def sums_of_shared_tokens(batch: Batch, values: torch.Tensor) -> torch.Tensor:
    """(B, T): the sum of the values at a token in all rows that hold it."""
    _, prompt = np.unique(batch.index, return_inverse=True)
    segments = batch.fields[SEGMENT_IDS.name]
    same = torch.from_numpy(prompt[:, None] == prompt)[..., None] & (segments[:, None] == segments)
    return (same * values).sum(1)


@pytest.mark.parametrize("seed", SEEDS)
def test_padding_rows_change_nothing_and_have_no_advantage(credit, values_of_fields, seed):
    batch = batch_of(credit, seed, values_of_fields)
    n = len(batch.index)
    padded = batch.rows(torch.tensor([*range(n), 0, 1]))
    padded.rewards[n:] = padded.mask[n:] = 0
    for name, values in padded.fields.items():
        values[n:] = math.nan if values.dim() == 1 else FIELDS[name].unsent or 0
    padded = padded._replace(index=np.array([*batch.index, "padding 1", "padding 2"], dtype=object))
    result = advantages(credit, padded)
    assert_equal(result[:n], advantages(credit, batch))
    assert not result[n:].any()


@pytest.mark.parametrize("seed", SEEDS)
def test_padding_columns_change_nothing(credit, values_of_fields, seed):
    batch = batch_of(credit, seed, values_of_fields)

    def wider(name: str, values: torch.Tensor) -> torch.Tensor:
        fill = FIELDS[name].unsent or 0 if name in FIELDS else 0
        return values if values.dim() == 1 else torch.nn.functional.pad(values, (0, 3), value=fill)

    fields = {name: wider(name, values) for name, values in batch.fields.items()}
    wide = Batch(*(wider("", values) for values in batch[:2]), batch.index, wider("", batch.entropy), fields)
    result, width = advantages(credit, wide), batch.mask.shape[1]
    assert_equal(result[:, :width], advantages(credit, batch))
    assert not result[:, width:].any()


@pytest.mark.parametrize("outcome", [0.0, 0.9, 1.0])
def test_equal_outcomes_have_no_advantage(credit, outcome):
    """Nothing is discounted and no field says more of a token; the trainer removes what rounding leaves upstream's."""
    batch = batch_of(credit, 0).with_outcomes(outcome)
    assert advantages(credit, batch, gamma=1.0).abs().max() < 1e-5


def test_a_row_alone_has_no_advantage(credit, values_of_fields):
    """Upstream's estimators give it its score, which the trainer removes."""
    if get_adv_estimator_fn(credit).__module__ != UPSTREAM:
        batch = batch_of(credit, 0)
        assert not advantages(credit, batch.rows(slice(0, 1)).with_outcomes(1.0)).any()


def test_a_reward_for_everybody_changes_nothing_where_the_group_is_compared(credit, values_of_fields):
    if parts("credit")[credit].compares is Compares.GROUP:
        batch = batch_of(credit, 1, values_of_fields)
        outcomes = batch.rewards.sum(-1)
        assert_equal(advantages(credit, batch.with_outcomes(outcomes + 3)), advantages(credit, batch))


def test_a_batch_without_tokens_has_no_advantage(credit):
    batch = batch_of(credit, 0)
    batch = batch._replace(rewards=0 * batch.rewards, mask=0 * batch.mask)
    assert not advantages(credit, batch).any()


# ---- what the registry says ----


def test_a_missing_field_is_named_or_taken_as_unsent(credit, values_of_fields):
    part, batch = parts("credit")[credit], batch_of(credit, 0, values_of_fields)
    for need in (*part.needs, *part.reward_fields):
        try:
            result = advantages(credit, batch, without=need.name)
        except RuntimeError as error:
            assert f"{need.name}" in str(error) and "which this trainer does not send" in str(error)
        else:
            unsent = torch.full_like(batch.fields[need.name], need.unsent)
            assert_equal(result, advantages(credit, batch._replace(fields={**batch.fields, need.name: unsent})))


def check(config: DictConfig) -> None:
    check_typed_sections(config)
    check_parts(config)


def test_a_trainer_that_does_not_send_its_fields_is_refused(credit):
    config, part = copied(run_config(credit)), parts("credit")[credit]
    config.trainer.v1.trainer_mode = "watched_sync"
    if needs := [need.name for need in (*part.needs, *part.reward_fields)]:
        with pytest.raises(ValueError, match=f"adv_estimator={credit} reads {', '.join(needs)}, which trainer.v1"):
            check(config)


def test_bad_keys_are_refused_by_their_full_names(credit):
    part = parts("credit")[credit]
    bad: dict[str, tuple[Any, str]] = {}
    for key, value in asdict(part.keys()).items() if part.keys else ():
        bad[key] = ([1] if isinstance(value, str) else "many", f"algorithm.{credit}.{key}=")
    if bad:
        bad["no_such_key"] = (1, f"algorithm.{credit} has no key no_such_key; known: {', '.join(bad)}")
    for key, (value, message) in bad.items():
        config = copied(run_config(credit))
        OmegaConf.update(config, f"algorithm.{credit}.{key}", value, force_add=True)
        with pytest.raises(ValueError) as error:
            check(config)
        assert message in str(error.value)


__all__ = ["values_of_fields", *(name for name in dir() if name.startswith("test_"))]
