"""Tests that hold for every loss, whatever its rule: on random rows with tools' tokens, by the run's own config.

    from tests.conformance.losses import *  # noqa: F403

    @pytest.fixture(params=["my_loss"])  # names of registered losses
    def loss(request):
        return request.param

Settings under `smallest` make the gradient proportional to the advantage where the registration says that it is.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.utils.config import omega_conf_to_dataclass

from tests.configs import composed, copied
from verl.trainer.checks.parts import check_parts, check_typed_sections, part_warnings
from verl.utils.parts import loss_of_switch, nested, parts
from verl.utils.token_fields import FIELDS
from verl.workers.config.keys import ACTOR

MODES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean"]
SEEDS = range(2)


class Batch(NamedTuple):
    """All (B, T): log-probs, advantages of the tokens, also outside the mask, and a number for each token field."""

    old: torch.Tensor
    new: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    field: torch.Tensor

    def rows(self, at) -> "Batch":
        return Batch(*(values[at] for values in self))


def batch_of(seed: int, rows: int = 8, length: int = 9, spread: float = 0.5) -> Batch:
    """A ragged mask with tools' tokens."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(length) < torch.randint(2, length + 1, (rows, 1), generator=generator)
    mask &= (torch.rand(rows, length, generator=generator) > 0.2) | (torch.arange(length) == 0)
    old = -torch.rand(rows, length, generator=generator) * 3 - 0.1
    new = old + spread * torch.randn(rows, length, generator=generator)
    advantages = torch.randn(rows, length, generator=generator)
    return Batch(old, new, advantages, mask.long(), torch.rand(rows, length, generator=generator))


@cache
def run_config(loss: str) -> DictConfig:
    config = composed("explore", "hardware=cpu", f"loss={loss}")
    OmegaConf.set_struct(config, False)
    config.merge_with(nested(parts("loss")[loss].smallest))
    return config


def changed(loss: str, changes: Mapping[str, Any]) -> DictConfig:
    """The run's config with other keys of `actor`."""
    config = copied(run_config(loss))
    for key, value in changes.items():
        OmegaConf.update(config, f"{ACTOR}.{key}", value, force_add=True)
    return config


class Step(NamedTuple):
    """A loss, summed over micro-batches, its gradient by the new log-probs (B, T), and its last metrics."""

    loss: float
    gradient: torch.Tensor
    metrics: dict[str, float]


def step(
    loss: str, batch: Batch, mode: str = "", micro_batch: int = 100, weights=None, without=(), of=None, **changes: Any
) -> Step:
    """Take a step on a batch, or on some rows `of` a larger one; `changes` are keys of `actor`."""
    actor = changed(loss, changes).actor_rollout_ref.actor
    config = omega_conf_to_dataclass(actor)
    whole, new = (of or batch).mask, batch.new.clone().requires_grad_()
    config.global_batch_info.update(dp_size=1, batch_num_tokens=whole.sum().item(), global_batch_size=len(whole))
    torch.manual_seed(0)  # clip_cov draws tokens
    total, metrics = 0.0, {}
    for rows in torch.arange(len(batch.mask)).split(micro_batch):
        part = batch.rows(rows)
        with ExitStack() as stack:
            for field in parts("loss")[loss].fields(actor):
                if field.name not in without:
                    stack.enter_context(FIELDS[field.name].bound(part.field))
            arguments = part.old, new[rows], part.advantages, part.mask, mode or config.loss_agg_mode, config
            value, metrics = get_policy_loss_fn(loss)(*arguments, None if weights is None else weights[rows])
        value.backward()
        total += value.item()
    return Step(total, new.grad, metrics)


# ---- gradients ----


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", SEEDS)
def test_numbers_are_finite_and_tokens_outside_the_mask_have_no_gradient(loss, mode, seed):
    batch = batch_of(seed)
    result = step(loss, batch, mode)
    assert result.gradient.isfinite().all() and result.gradient.any() and not result.gradient[batch.mask == 0].any()
    assert all(torch.isfinite(torch.as_tensor(value)) for value in (result.loss, *result.metrics.values()))


def test_extreme_log_probs_have_finite_gradients_where_the_loss_is_proportional(loss):
    """Upstream's others have none."""
    if not parts("loss")[loss].proportional:
        return
    log_ratio = torch.tensor([[-1e4, -30.0, 30.0, 1e4, 0.0, 0.1]]).repeat(2, 1)
    ones = torch.ones_like(log_ratio)
    for advantage in (1.0, -1.0):
        for old in (0.0, -200.0):
            result = step(loss, Batch(old * ones, old + log_ratio, advantage * ones, ones.long(), ones / 2))
            assert result.gradient.isfinite().all() and torch.isfinite(torch.tensor(result.loss))


def test_an_advantage_of_1_makes_every_token_likelier_where_the_policy_has_not_moved(loss):
    batch = batch_of(0, spread=0.0)._replace(advantages=torch.ones(8, 9), field=torch.full((8, 9), 0.5))
    gradient = step(loss, batch).gradient
    assert (gradient[batch.mask == 1] < 0).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_proportional_losss_gradient_grows_with_the_advantage_and_is_0_without(loss, seed):
    if parts("loss")[loss].proportional:
        batch = batch_of(seed)
        batch.advantages[:, 2] = batch.advantages[3] = 0
        gradient = step(loss, batch).gradient
        assert gradient.any() and not gradient[batch.advantages == 0].any()
        larger = step(loss, batch._replace(advantages=3 * batch.advantages)).gradient
        torch.testing.assert_close(larger, 3 * gradient)


@pytest.mark.parametrize("seed", SEEDS)
def test_rows_without_advantages_may_be_skipped_where_the_loss_is_proportional(loss, seed):
    if parts("loss")[loss].proportional:
        batch, others = batch_of(seed), torch.arange(1, 8, 2)
        batch.advantages[::2] = 0
        result = step(loss, batch.rows(others), of=batch).gradient
        torch.testing.assert_close(result, step(loss, batch).gradient[others])


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_proportional_losss_micro_batches_add_up(loss, mode, seed):
    batch = batch_of(seed)
    whole = step(loss, batch, mode)
    if parts("loss")[loss].proportional:
        for size in (1, 3):
            result = step(loss, batch, mode, micro_batch=size)
            torch.testing.assert_close(result.gradient, whole.gradient, rtol=1e-4, atol=1e-7)
            assert result.loss == pytest.approx(whole.loss, rel=1e-4, abs=1e-6)


def test_a_correction_weighs_each_token(loss):
    """Upstream's `rollout_is_weights`, for tokens that another policy generated."""
    batch = batch_of(3)
    weights = 2 * torch.rand(batch.mask.shape, generator=torch.Generator().manual_seed(3))
    weights[0] = 0
    plain, weighted = (step(loss, batch, weights=each).gradient for each in (None, weights))
    torch.testing.assert_close(weighted, plain * weights)
    assert plain[0].any() and not weighted[0].any()


@pytest.mark.parametrize("mode", MODES)
def test_a_loss_with_all_switches_off_is_vanilla(loss, mode):
    """This holds with and without a correction; so is a loss that wraps another one and keeps every token."""
    part, batch = parts("loss")[loss], batch_of(1)
    if part.switches or part.wraps:
        clip = {key: run_config(loss).actor_rollout_ref.actor[key] for key in CLIP}
        weights = torch.rand(batch.mask.shape, generator=torch.Generator().manual_seed(0))
        batch = batch._replace(field=torch.ones_like(batch.field))
        for each in (None, weights):
            result = step(loss, batch, mode, weights=each, **dict.fromkeys(part.switches, False))
            expected = step("vanilla", batch, mode, weights=each, **clip)
            assert result.loss == pytest.approx(expected.loss, rel=1e-5, abs=1e-7)
            torch.testing.assert_close(result.gradient, expected.gradient, rtol=1e-5, atol=1e-8)
            assert expected.metrics.items() <= result.metrics.items()


CLIP = ["clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c"]


# ---- what the registry says ----


def test_a_missing_field_is_named(loss):
    part = parts("loss")[loss]
    for field in part.fields(run_config(loss).actor_rollout_ref.actor):
        with pytest.raises(RuntimeError, match=f"needs every token's {field.name}, which this trainer does not send"):
            step(loss, batch_of(0), without=(field.name,))


def check(config: DictConfig) -> None:
    check_typed_sections(config)
    check_parts(config)


def test_a_run_with_the_loss_passes_the_checks_and_shows_its_warning(loss):
    config = run_config(loss)
    check(config)
    assert config.actor_rollout_ref.actor.policy_loss.loss_mode == loss
    warning = parts("loss")[loss].warning
    assert part_warnings(config) == ([f"loss={loss}: {warning}"] if warning else [])


def test_its_switches_are_refused_with_another_loss(loss):
    for switch in parts("loss")[loss].switches:
        assert loss_of_switch()[switch] == loss
        with pytest.raises(ValueError, match=f"loss_mode=vanilla does not know {switch}: set it to {loss}, or"):
            check(changed("vanilla", {switch: True}))


def test_bad_keys_are_refused_by_their_full_names(loss):
    part = parts("loss")[loss]
    for key, value in asdict(part.keys()).items() if part.keys else ():
        for wrong in ([1] if isinstance(value, str) else "many", None):
            with pytest.raises(ValueError, match=f"{ACTOR}.*{key}"):
                check(changed(loss, {key: wrong}))
    with pytest.raises(ValueError, match=f"{ACTOR} has no key no_such_key; known: "):
        check(changed(loss, {"no_such_key": 1}))


def test_entropies_of_the_old_policy_are_needed_where_a_field_is_computed_from_them(loss):
    config = copied(run_config(loss))
    if any(field.unsent is None for field in parts("loss")[loss].fields(config.actor_rollout_ref.actor)):
        OmegaConf.update(config, "algorithm.rollout_correction.bypass_mode", True, force_add=True)
        with pytest.raises(ValueError, match=f"which actor.policy_loss.loss_mode={loss} needs"):
            check(config)


__all__ = [name for name in dir() if name.startswith("test_")]
