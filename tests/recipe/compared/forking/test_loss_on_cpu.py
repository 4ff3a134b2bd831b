"""The 80/20 mask against a slow version that counts, around every loss that it may wrap, and in a run's config."""

import math
from contextlib import ExitStack

import pytest
import torch
from verl.trainer.ppo.core_algos import get_policy_loss_fn

from recipe.arpo.loss import STANDARDIZED_ENTROPY, standardize_entropy
from recipe.compared.forking.loss import FORKING_WEIGHT, compute_policy_loss_forking, forking_weights
from recipe.hapo.normalized_entropy import ENTROPY_H, compute_entropy_h
from tests.configs import composed
from tests.recipe import losses
from tests.recipe.losses import assert_token_by_token, random_batch, slow_clipped_loss
from tests.tables import table
from verl.trainer.checks.parts import check_parts, check_typed_sections
from verl.trainer.ppo.loss.token_losses import ENTROPY_RANK, entropy_rank
from verl.trainer.ppo.v1.component import components_of
from verl.trainer.ppo.v1.explore_trainer import compute_fields
from verl.utils.parts import computed_fields, parts

ACTOR = "actor_rollout_ref.actor"
WRAPPED = [name for name, loss in parts("loss").items() if loss.proportional and not loss.wraps]
SWITCHES = {
    "hapo": {"adaptive_clip": True, "adaptive_advantage": True},
    "aepo": {"enable_entropy_balanced_clipping": True, "enable_entropy_balanced_advantage": True},
}


def actor_config(loss_mode="forking", **changes):
    return losses.actor_config(loss_mode, **{"clip_ratio_low": 0.2, "clip_ratio_high": 0.28} | changes)


def slow_kept(entropy, mask, ratio):
    """A token is kept if fewer than ratio n tokens are more uncertain than it."""
    values = [entropy[i, t].item() for i, t in mask.nonzero().tolist()]
    kept = torch.zeros(entropy.shape, dtype=torch.bool)
    for i, t in mask.nonzero().tolist():
        kept[i, t] = sum(value > entropy[i, t].item() for value in values) < ratio * len(values)
    return kept


# ---- the mask ----


@pytest.mark.parametrize(("ratio", "n", "kept"), [(0.07, 100, 7), (0.29, 100, 29), (0.14, 50, 7), (0.071, 100, 8)])
def test_the_share_is_the_decimal_number_of_the_config(ratio, n, kept):
    weights, _ = forking_weights(torch.arange(n).float().unsqueeze(0), torch.ones(1, n), ratio, "all")
    assert weights.sum() == kept


@pytest.mark.parametrize("ratio", [0.01, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_kept_tokens_are_those_that_few_exceed(seed, ratio):
    entropy, mask, *_ = random_batch(seed)
    kept = slow_kept(entropy, mask, ratio)
    weights, threshold = forking_weights(entropy, mask, ratio, "all")
    assert torch.equal(weights, kept.float()) and kept.any()
    assert threshold == entropy[kept].min().item()
    scaled, _ = forking_weights(entropy, mask, ratio, "kept")
    assert torch.equal(scaled > 0, kept) and scaled[mask.bool()].mean().item() == pytest.approx(1.0)
    assert torch.equal(kept, mask.bool()) or ratio < 1


def test_equal_entropies_are_all_kept_and_one_token_is():
    for shape in ((3, 4), (1, 1)):
        weights, _ = forking_weights(torch.full(shape, 0.7), torch.ones(shape), 0.2, "kept")
        assert (weights == 1).all()


def test_an_entropy_that_is_not_finite_is_not_kept():
    entropy = torch.tensor([[math.nan, 1.0, 2.0, math.inf, 0.5]])
    weights, threshold = forking_weights(entropy, torch.ones(1, 5), 0.34, "kept")
    assert weights.tolist() == [[0.0, 2.5, 2.5, 0.0, 0.0]] and threshold == 1.0


# ---- the loss ----


@pytest.mark.parametrize("denominator", ["all", "kept"])
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_gradient_token_by_token(seed, denominator):
    config = actor_config()
    entropy, mask, old, new, advantages = random_batch(seed)
    kept = slow_kept(entropy, mask, 0.2)
    with FORKING_WEIGHT.bound(forking_weights(entropy, mask, 0.2, denominator)[0]):
        loss, metrics = compute_policy_loss_forking(old, new, advantages, mask, "token-mean", config)

    def slow_token_loss(log_prob, i, t):
        return slow_clipped_loss(log_prob, old[i, t], advantages[i, t].item(), 0.2, 0.28, config)

    assert_token_by_token(loss, new, kept, slow_token_loss, (mask if denominator == "all" else kept).sum())
    assert all(math.isfinite(value) for value in metrics.values())


def gradient(name: str, batch, mode: str, weights=None, is_weights=None, **changes) -> torch.Tensor:
    """Return the gradient of the loss `name`, or of the loss `forking` around it if there are weights."""
    entropy, mask, old, new, advantages = batch
    config = actor_config("forking" if weights is not None else name, forking_loss=name, **changes)
    fields = {ENTROPY_H: compute_entropy_h(entropy, mask)[0], ENTROPY_RANK: entropy_rank(entropy, mask)[0]}
    fields |= {STANDARDIZED_ENTROPY: standardize_entropy(entropy, mask)[0]}
    with ExitStack() as stack:
        for field, values in fields.items():
            stack.enter_context(field.bound(values))
        if weights is not None:
            stack.enter_context(FORKING_WEIGHT.bound(weights))
        function = get_policy_loss_fn(config.policy_loss.loss_mode)
        loss, _ = function(old, new, advantages, mask, mode, config, is_weights)
    return torch.autograd.grad(loss, new)[0]


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("name", WRAPPED)
def test_a_kept_token_has_the_gradient_of_the_wrapped_loss(name, mode):
    """The other keys, fields and weights of a wrapped loss stay as they are."""
    entropy, mask, *_ = batch = random_batch(7)
    is_weights = torch.rand(mask.shape, generator=torch.Generator().manual_seed(0))
    whole = gradient(name, batch, mode, None, is_weights, **SWITCHES.get(name, {}))
    for denominator in ("all", "kept"):
        weights, _ = forking_weights(entropy, mask, 0.2, denominator)
        masked = gradient(name, batch, mode, weights, is_weights, **SWITCHES.get(name, {}))
        torch.testing.assert_close(masked, whole * weights)
        assert masked.any()


# ---- in a run ----


@pytest.mark.parametrize(("loss", "fields"), table(__file__, "fields of losses"))
def test_a_run_computes_the_weights_and_the_fields_of_the_wrapped_loss(loss, fields):
    settings = [f"{ACTOR}.policy_loss.loss_mode=forking", f"{ACTOR}.forking_loss={loss}", f"{ACTOR}.forking_ratio=0.4"]
    config = composed("explore", "hardware=cpu", f"loss={loss}", *settings)
    check_typed_sections(config)
    check_parts(config)
    needs, components = computed_fields(config), components_of(config)
    assert {field.name for field in needs} == fields
    entropy, mask, *_ = random_batch(1)
    metrics: dict = {}
    values = compute_fields(needs, components, entropy, mask.bool(), metrics)
    kept = slow_kept(entropy, mask, 0.4)
    assert torch.equal(values["forking_weight"], kept.float())
    assert metrics["forking/kept_share"] == pytest.approx((kept.sum() / mask.sum()).item())
    assert metrics["forking/entropy_threshold"] == entropy[kept].min().item()
