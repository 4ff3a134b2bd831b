"""What the registry says of losses holds for upstream's functions, and of ours; hand-computed numbers of upstream's."""

import math

import pytest
import torch
from verl.trainer.ppo.core_algos import get_policy_loss_fn

from tests.configs import composed
from tests.conformance.losses import batch_of, step
from verl.trainer.checks import callback
from verl.utils.parts import parts
from verl.workers.config import PolicyLossConfig
from verl.workers.config.explore import ExploreActorConfig

BY_MICRO_BATCH = ["clip_cov", "kl_cov"]


def actor_config(name: str, **changes):
    values = {"strategy": "fsdp", "rollout_n": 4, "ppo_micro_batch_size_per_gpu": 1, **changes}
    return ExploreActorConfig(**values, policy_loss=PolicyLossConfig(loss_mode=name))


def loss_and_gradient(name, log_ratio, advantages, mode="token-sum", old=-1.0, **changes):
    """Of one row; `old` is the old policy's log-prob of all its tokens."""
    log_ratio, advantages = torch.tensor([log_ratio]), torch.tensor([advantages])
    old = torch.full_like(log_ratio, old)
    log_prob = (old + log_ratio).requires_grad_()
    config = actor_config(name, **changes)
    loss, _ = get_policy_loss_fn(name)(old, log_prob, advantages, torch.ones_like(old), mode, config)
    (gradient,) = torch.autograd.grad(loss, log_prob)
    return loss.item(), gradient[0].tolist()


# ---- upstream's numbers; log-ratios 0.1 and 0.3, advantages 1, clip range 0.2 ----


def test_gspo_clips_the_ratio_of_the_row():
    loss, gradient = loss_and_gradient("gspo", [0.1, 0.3], [1.0, 1.0])
    assert loss == pytest.approx(2 * -1.2) and gradient == [0.0, 0.0]  # e^0.2 = 1.2214
    loss, gradient = loss_and_gradient("gspo", [0.1, 0.3], [1.0, -2.0], clip_ratio_high=0.3)
    assert loss == pytest.approx(1.2214, abs=1e-4) and gradient == pytest.approx([-1.2214, 2.4428], abs=1e-4)


def test_geo_mean_averages_the_advantages_of_the_row():
    """Therefore it is no choice: credits of tokens would be lost."""
    assert loss_and_gradient("geo_mean", [0.1, 0.3], [1.0, 1.0])[0] == pytest.approx(-1.1618, abs=1e-4)  # -e^0.15
    different, same = (loss_and_gradient("geo_mean", [0.1, 0.1], each)[0] for each in ([3.0, 1.0], [2.0, 2.0]))
    assert different == pytest.approx(same) and "geo_mean" not in parts("loss")


def test_cispo_weighs_with_the_clipped_ratio():
    _, gradient = loss_and_gradient("cispo", [0.1, 0.3], [1.0, 1.0])
    assert gradient == pytest.approx([-1.1052, -1.2], abs=1e-4)
    _, gradient = loss_and_gradient("cispo", [-3.0, -3.0], [1.0, -1.0])
    assert gradient == pytest.approx([-0.8, 0.8])
    _, gradient = loss_and_gradient("cispo", [-3.0, -3.0], [1.0, -1.0], clip_ratio_low=1.0)
    assert gradient == pytest.approx([-math.exp(-3), math.exp(-3)])


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [(1.5, 1.0, -2.4898), (1.5, -1.0, 2.3936), (1.0, 1.0, -2.0), (1.0, -1.0, 1.9048)],
)
def test_sapos_gate(ratio, advantage, expected):
    assert loss_and_gradient("sapo", [math.log(ratio)], [advantage])[0] == pytest.approx(expected, abs=1e-4)


def test_sapo_averages_by_rows_whatever_the_mode():
    modes = ("token-sum", "token-mean", "seq-mean-token-mean")
    losses = {mode: loss_and_gradient("sapo", [0.1, 0.3, 0.2], [1.0, 1.0, -1.0], mode)[0] for mode in modes}
    assert len(set(losses.values())) == 1


@pytest.mark.parametrize(("name", "inside", "outside"), [("dppo_tv", 0.14, 0.16), ("dppo_kl", 0.04, 0.06)])
def test_dppos_thresholds_are_of_a_divergence(name, inside, outside):
    """The old probability is 1/2. Total variation: the difference. KL: of the two outcomes, token or another."""
    low, up = 0.5, 0.9999
    for _ in range(60):  # the new probability at which the divergence is the one between inside and outside
        middle = (low + up) / 2
        kl = 0.5 * math.log(0.5 / middle) + 0.5 * math.log(0.5 / (1 - middle))
        divergence = middle - 0.5 if name == "dppo_tv" else kl
        low, up = (middle, up) if divergence < (inside + outside) / 2 else (low, middle)
    options = {"old": math.log(0.5), "clip_ratio_c": 20.0}
    for threshold, alive in ((outside, True), (inside, False)):
        clip = {"clip_ratio_low": threshold, "clip_ratio_high": threshold}
        _, gradient = loss_and_gradient(name, [math.log(2 * low)], [1.0], **clip, **options)
        assert gradient == pytest.approx([-2 * low if alive else 0.0], rel=1e-4)
        _, gradient = loss_and_gradient(name, [math.log(2 * low)], [-1.0], **clip, **options)
        assert gradient == pytest.approx([2 * low], rel=1e-4)  # it moves back


def test_kl_cov_acts_where_the_advantage_is_0():
    _, gradient = loss_and_gradient("kl_cov", [0.5], [0.0])
    assert gradient == pytest.approx([0.1])  # ppo_kl_coef


def test_clip_cov_depends_on_rows_without_advantages():
    """The mean advantage and log-prob are of all rows of a micro-batch."""
    old, advantages = torch.full((2, 8), -1.5), torch.zeros(2, 8)
    old[0, :2], advantages[0, :2] = torch.tensor([-0.1, -3.0]), 2.0
    mask = torch.ones(2, 8)
    mask[0, 2:] = 0
    gradients = []
    for rows in ([0, 1], [0]):
        new = old[rows].clone().requires_grad_()
        loss, _ = get_policy_loss_fn("clip_cov")(
            old[rows], new, advantages[rows], mask[rows], "token-sum", actor_config("clip_cov")
        )
        gradients.append(torch.autograd.grad(loss, new)[0][0, :2].tolist())
    assert gradients == [[0.0, -2.0], [-2.0, -2.0]]


def test_the_default_keys():
    config, keys = actor_config("vanilla"), PolicyLossConfig()
    assert (config.clip_ratio_low, config.clip_ratio_high, config.clip_ratio_c) == (0.2, 0.2, 3.0)
    assert (config.tau_pos, config.tau_neg) == (1.0, 1.05)
    assert (keys.clip_cov_ratio, keys.clip_cov_lb, keys.clip_cov_ub) == (2e-4, 1.0, 5.0)
    assert (keys.kl_cov_ratio, keys.ppo_kl_coef, keys.dro_beta) == (2e-4, 0.1, None)


# ---- what the registry says ----


@pytest.mark.parametrize("name", BY_MICRO_BATCH)
def test_that_of_others_does(name):
    rows = batch_of(1)
    rows = rows._replace(advantages=3 * rows.advantages * rows.mask)
    whole, cut = (step(name, rows, micro_batch=size).gradient for size in (100, 1))
    assert not torch.allclose(whole, cut)
    assert not parts("loss")[name].proportional


def test_the_clip_values_are_the_papers():
    actors = {
        name: composed("explore", "hardware=cpu", f"loss={name}").actor_rollout_ref.actor
        for name in ("gspo", "sapo", "cispo", "dppo_tv", "dppo_kl")
    }
    assert (actors["gspo"].clip_ratio_low, actors["gspo"].clip_ratio_high) == (3e-4, 4e-4)
    assert actors["gspo"].loss_agg_mode == actors["sapo"].loss_agg_mode == "seq-mean-token-mean"
    assert 1 - actors["cispo"].clip_ratio_low == 0
    assert actors["dppo_tv"].clip_ratio_low == 0.15 and actors["dppo_kl"].clip_ratio_low == 0.05


def test_a_warning_is_printed_before_the_run(monkeypatch, capsys):
    monkeypatch.setenv("DRY_RUN", "1")
    for name in ("settle", "check_run", "check_ray_resources"):
        monkeypatch.setattr(callback, name, lambda *_, **__: None)
    monkeypatch.setattr(callback, "describe_plan", lambda _: "the plan")
    for name, warnings in (("kl_cov", 1), ("vanilla", 0)):
        with pytest.raises(SystemExit):
            callback.Preflight().on_run_start(composed("explore", "hardware=cpu", f"loss={name}"))
        assert capsys.readouterr().out.count(f"warning: loss={name}: upstream selects tokens") == warnings
