"""Upstream's losses behave as our registry says, and a run prints the registry's warnings before it starts."""

import pytest
import torch
from verl.trainer.ppo.core_algos import get_policy_loss_fn

from tests.configs import composed
from tests.conformance.losses import batch_of, step
from tests.recipe.losses import actor_config
from verl.trainer.checks import callback
from verl.utils.parts import parts

BY_MICRO_BATCH = ["clip_cov", "kl_cov"]


def loss_and_gradient(name, log_ratio, advantages, mode="token-sum", old=-1.0, **changes):
    """Return loss and gradient of one row; `old` is the old policy's log-prob of each of its tokens."""
    log_ratio, advantages = torch.tensor([log_ratio]), torch.tensor([advantages])
    old = torch.full_like(log_ratio, old)
    log_prob = (old + log_ratio).requires_grad_()
    config = actor_config(name, **changes)
    loss, _ = get_policy_loss_fn(name)(old, log_prob, advantages, torch.ones_like(old), mode, config)
    (gradient,) = torch.autograd.grad(loss, log_prob)
    return loss.item(), gradient[0].tolist()


# ---- upstream's functions ----


def test_sapo_averages_by_rows_whatever_the_mode():
    modes = ("token-sum", "token-mean", "seq-mean-token-mean")
    losses = {mode: loss_and_gradient("sapo", [0.1, 0.3, 0.2], [1.0, 1.0, -1.0], mode)[0] for mode in modes}
    assert len(set(losses.values())) == 1


# ---- what the registry says ----


@pytest.mark.parametrize("name", BY_MICRO_BATCH)
def test_losses_that_select_tokens_depend_on_their_micro_batches(name):
    rows = batch_of(1)
    rows = rows._replace(advantages=3 * rows.advantages * rows.mask)
    whole, cut = (step(name, rows, micro_batch=size).gradient for size in (100, 1))
    assert not torch.allclose(whole, cut)
    assert not parts("loss")[name].proportional


def test_a_warning_is_printed_before_the_run(monkeypatch, capsys):
    monkeypatch.setenv("DRY_RUN", "1")
    for name in ("settle", "check_run", "check_ray_resources"):
        monkeypatch.setattr(callback, name, lambda *_, **__: None)
    monkeypatch.setattr(callback, "describe_plan", lambda _: "the plan")
    for name, warnings in (("kl_cov", 1), ("vanilla", 0)):
        with pytest.raises(SystemExit):
            callback.Preflight().on_run_start(composed("explore", "hardware=cpu", f"loss={name}"))
        assert capsys.readouterr().out.count(f"warning: loss={name}: upstream selects tokens") == warnings
