"""ARPO's and AEPO's formulas by hand, against slow versions written out token by token, and on degenerate batches."""

import math

import numpy as np
import pytest
import torch
from verl.trainer.ppo.core_algos import (
    compute_grpo_outcome_advantage,
    compute_policy_loss_vanilla,
    get_adv_estimator_fn,
    get_policy_loss_fn,
)

from verl.trainer.ppo.aepo_algos import (
    SEGMENT_IDS,
    STANDARDISED_ENTROPY,
    compute_arpo_hard_advantage,
    compute_policy_loss_aepo,
    entropy_balanced_advantage,
    entropy_balanced_clipping,
    mean_over_segments,
    standardise_entropy,
)
from verl.workers.config import PolicyLossConfig
from verl.workers.config.aepo import AEPOActorConfig

LOSS = compute_policy_loss_aepo
AGGREGATIONS = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


def actor_config(loss_mode="aepo", **changes):
    values = {"strategy": "fsdp", "rollout_n": 4, "ppo_micro_batch_size_per_gpu": 1, "clip_ratio_c": 10.0}
    values |= {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.28, **changes}
    return AEPOActorConfig(**values, policy_loss=PolicyLossConfig(loss_mode=loss_mode))


# ---- ARPO: hard advantage ----


def hard_advantage(rewards, mask, index, segment_ids, **config):
    with SEGMENT_IDS.given(segment_ids):
        return compute_arpo_hard_advantage(rewards, mask, index, config=config)[0]


def test_the_hard_advantage_by_hand():
    """Four trajectories of one prompt with advantages 3, 1, -1, -3; `|` marks where the first three part.

    a: 0 0 7 | 1 1        7 is a tool's token
    b: 0 0 7 | 2 3        b and c part again after 2
    c: 0 0 7 | 2
    d: 4 4
    """
    segment_ids = torch.tensor([[0, 0, 7, 1, 1], [0, 0, 7, 2, 3], [0, 0, 7, 2, -1], [4, 4, -1, -1, -1]])
    mask = torch.tensor([[1, 1, 0, 1, 1], [1, 1, 0, 1, 1], [1, 1, 0, 1, 0], [1, 1, 0, 0, 0]])
    rewards = torch.zeros(4, 5)
    rewards[:, 0] = torch.tensor([3.0, 1.0, -1.0, -3.0])
    hard = hard_advantage(rewards, mask, np.array(["u"] * 4), segment_ids, norm_adv_by_std_in_grpo=False)
    expected = [[1, 1, 0, 3, 3], [1, 1, 0, 0, 1], [1, 1, 0, 0, 0], [-3, -3, 0, 0, 0]]
    torch.testing.assert_close(hard, torch.tensor(expected, dtype=torch.float32))
    scaled = hard_advantage(rewards, mask, np.array(["u"] * 4), segment_ids)
    torch.testing.assert_close(scaled, hard / math.sqrt(20 / 3), rtol=1e-5, atol=1e-6)


def test_a_trajectory_that_is_there_twice_counts_twice():
    ids = torch.tensor([[0, 1], [0, 1], [0, 2]])
    hard, passing = mean_over_segments(torch.tensor([1.0, 1.0, -2.0]), ids, torch.zeros(3, dtype=torch.long))
    assert hard.tolist() == [[0.0, 1.0], [0.0, 1.0], [0.0, -2.0]]
    assert passing.tolist() == [[3, 2], [3, 2], [3, 1]]


def test_a_truncated_or_interrupted_segment_counts_its_trajectory_once():
    ids = torch.tensor([[0, 0, 0, 0], [0, -1, 0, 0], [0, -1, -1, -1]])
    hard, passing = mean_over_segments(torch.tensor([3.0, 6.0, 9.0]), ids, torch.zeros(3, dtype=torch.long))
    assert hard.tolist() == [[6.0] * 4, [6.0, 6.0, 6.0, 6.0], [6.0, 9.0, 9.0, 9.0]]
    assert passing.tolist() == [[3] * 4, [3, 1, 3, 3], [3, 1, 1, 1]]


def random_forest(seed: int, groups: int = 5, n: int = 6, length: int = 12):
    """Rows of `groups` prompts, shuffled: (index, segment_ids, mask, rewards). Ids repeat across groups.

    A trajectory is cut into blocks; its first few are those of another of its group.
    """
    generator = np.random.default_rng(seed)
    rows = []
    for group in range(groups):
        fresh, of_group = 0, []
        for _ in range(n):
            kept = of_group[generator.integers(len(of_group))] if of_group and generator.random() < 0.7 else []
            blocks = list(kept[: generator.integers(len(kept) + 1)])
            while sum(size for _, size in blocks) < length - 3:
                blocks.append((fresh, int(generator.integers(1, 4))))
                fresh += 1
            of_group.append(blocks)
            rows.append((f"prompt {group}", [name for name, size in blocks for _ in range(size)]))
    rows = [rows[i] for i in generator.permutation(len(rows))]
    segment_ids = torch.tensor([ids + [-1] * (length - len(ids)) for _, ids in rows])
    mask = (segment_ids >= 0) & (segment_ids % 4 != 3)  # every fourth segment is a tool's
    rewards = torch.zeros(len(rows), length)
    rewards[:, -1] = torch.from_numpy(generator.integers(0, 3, len(rows))).float()
    return np.array([uid for uid, _ in rows], dtype=object), segment_ids, mask.long(), rewards


def slow_hard_advantage(rewards, mask, index, segment_ids):
    scores = [sum(row) for row in rewards.tolist()]
    soft = []
    for uid, score in zip(index, scores, strict=True):
        of_group = [s for s, other in zip(scores, index, strict=True) if other == uid]
        soft.append((score - np.mean(of_group)) / (np.std(of_group, ddof=1) + 1e-6))
    hard = torch.zeros(mask.shape)
    for i, t in mask.nonzero().tolist():
        segment = segment_ids[i, t].item()
        through = [soft[j] for j in range(len(index)) if index[j] == index[i] and segment in segment_ids[j].tolist()]
        hard[i, t] = np.mean(through)
    return hard


@pytest.mark.parametrize("seed", range(5))
def test_the_hard_advantage_token_by_token(seed):
    index, segment_ids, mask, rewards = random_forest(seed)
    hard = hard_advantage(rewards, mask, index, segment_ids)
    torch.testing.assert_close(hard, slow_hard_advantage(rewards, mask, index, segment_ids), rtol=1e-4, atol=1e-5)
    soft, _ = compute_grpo_outcome_advantage(rewards, mask, index)
    assert (hard - soft).abs().max() > 0.1
    # where every trajectory has the whole segment, averaging moves advantage but makes none
    assert hard.sum().item() == pytest.approx(soft.sum().item(), abs=1e-3)


@pytest.mark.parametrize("norm", [True, False])
def test_without_sharing_hard_is_soft(norm):
    index, segment_ids, mask, rewards = random_forest(1)
    alone = torch.where(segment_ids >= 0, segment_ids + 100 * torch.arange(len(index)).unsqueeze(-1), -1)
    soft, _ = compute_grpo_outcome_advantage(rewards, mask, index, norm_adv_by_std_in_grpo=norm)
    for ids in (alone, torch.full_like(alone, -1)):
        hard = hard_advantage(rewards, mask, index, ids, norm_adv_by_std_in_grpo=norm)
        assert torch.equal(hard, soft)


def test_equal_ids_of_two_prompts_are_two_segments():
    ids = torch.tensor([[0], [0], [0], [0]])
    hard, passing = mean_over_segments(torch.tensor([1.0, 2.0, 3.0, 5.0]), ids, torch.tensor([0, 1, 0, 1]))
    assert hard.tolist() == [[2.0], [3.5], [2.0], [3.5]] and passing.tolist() == [[2]] * 4


def test_a_masked_trajectory_still_counts_for_its_segments():
    ids, mask = torch.tensor([[0, 1], [0, 2]]), torch.tensor([[1, 1], [0, 0]])
    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    hard = hard_advantage(rewards, mask, np.array([0, 0]), ids, norm_adv_by_std_in_grpo=False)
    assert hard.tolist() == [[0.0, 0.5], [0.0, 0.0]]


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_no_tokens(shape):
    ids = torch.zeros(shape, dtype=torch.long)
    hard = hard_advantage(torch.zeros(shape), torch.zeros(shape), np.array(["a", "b"][: shape[0]], dtype=object), ids)
    assert hard.shape == shape


def test_missing_and_misshapen_segments_are_named():
    rewards, mask, index = torch.zeros(2, 3), torch.ones(2, 3), np.array([0, 0])
    with pytest.raises(RuntimeError, match="arpo_hard needs every token's segment_ids"):
        compute_arpo_hard_advantage(rewards, mask, index)
    with pytest.raises(ValueError, match=r"segment_ids \(2, 2\): expected \(2, 3\)"):
        hard_advantage(rewards, mask, index, torch.zeros(2, 2, dtype=torch.long))


# ---- AEPO: standardised entropy, advantage ----


def random_batch(seed: int, rows: int = 12, length: int = 9):
    """Entropies, ragged mask (one empty row), old and new log-probs (ratios far from 1), advantages."""
    generator = torch.Generator().manual_seed(seed)
    entropy = torch.rand(rows, length, generator=generator) ** 4 * 3
    lengths = torch.randint(1, length + 1, (rows,), generator=generator)
    lengths[rows // 2] = 0
    mask = (torch.arange(length) < lengths[:, None]).long()
    old = -torch.rand(mask.shape, generator=generator) * 3
    new = (old + 0.8 * torch.randn(mask.shape, generator=generator)).requires_grad_()
    advantages = torch.randn(rows, 1, generator=generator) * mask
    return entropy, mask, old, new, advantages


@pytest.mark.parametrize("seed", range(3))
def test_entropy_is_standardised_over_the_valid_tokens(seed):
    entropy, mask, *_ = random_batch(seed)
    standardised, moments = standardise_entropy(entropy, mask)
    values = entropy[mask.bool()].tolist()
    mean, std = np.mean(values), np.std(values)
    assert list(moments) == pytest.approx([mean, std], rel=1e-6)
    assert standardised[mask.bool()].tolist() == pytest.approx([(v - mean) / std for v in values], abs=1e-5)
    assert (standardised[mask == 0] == 0).all()


@pytest.mark.parametrize(
    ("entropy", "mask", "mean"),
    [
        (torch.rand(3, 4), torch.zeros(3, 4), 0.0),
        (torch.zeros(0, 4), torch.zeros(0, 4), 0.0),
        (torch.full((2, 3), 0.7), torch.ones(2, 3), 0.7),
        (torch.full((1, 1), 0.4), torch.ones(1, 1), 0.4),
        (torch.tensor([[0.5, math.nan], [0.5, math.inf]]), torch.tensor([[1, 0], [1, 0]]), 0.5),
    ],
    ids=["all masked", "no rows", "all equal", "one token", "nan outside the mask"],
)
def test_entropies_that_do_not_differ_change_nothing(entropy, mask, mean):
    standardised, moments = standardise_entropy(entropy, mask)
    assert standardised.shape == entropy.shape and (standardised == 0).all()
    assert moments.mean == pytest.approx(mean) and moments.std < 1e-6


def test_the_balanced_advantage_by_hand():
    z = torch.tensor([-1.0, 0.0, 2.0, -7.0], requires_grad=True)
    advantages = torch.tensor([2.0, -1.0, -1.0, 3.0], requires_grad=True)
    balanced = entropy_balanced_advantage(advantages, z)
    assert balanced.tolist() == pytest.approx([1.6, -1.0, -1.4, 0.0])  # never turned round
    balanced.sum().backward()
    assert z.grad is None and advantages.grad.tolist() == pytest.approx([0.8, 1.0, 1.4, 0.0])


# ---- AEPO: clipping ----


def test_balanced_clipping_by_hand():
    log_ratio = torch.tensor([-2.0, 0.1, 0.5, 19.0], requires_grad=True)
    clipped = entropy_balanced_clipping(log_ratio.exp(), 0.28)
    assert clipped.tolist() == pytest.approx([math.exp(-2), math.exp(0.1), 1.28, 1.28])
    clipped.sum().backward()
    assert log_ratio.grad.tolist() == pytest.approx([math.exp(-2), math.exp(0.1), 1.28, 1.28])


#   ratio, advantage, gradient of the token's loss with respect to its log-probability: PPO's, AEPO's
TOKENS = [
    (2.0, 1.5, 0.0, -1.5 * 1.28),  # above the upper clip, wanted: the one that AEPO keeps alive
    (1.1, 1.5, -1.5 * 1.1, -1.5 * 1.1),  # inside
    (0.5, 1.5, -1.5 * 0.5, -1.5 * 0.5),  # below the lower clip, wanted: PPO does not clip it
    (2.0, -1.0, 2.0, 2.0),  # above, not wanted: PPO does not clip it
    (0.5, -1.0, 0.0, 0.0),  # below, not wanted: the lower clip stays
    (12.0, -1.0, 0.0, 0.0),  # dual clip at 10 stays
    (2.0, 0.0, 0.0, 0.0),
]


def test_which_tokens_get_a_gradient():
    ratio, advantages, of_ppo, of_aepo = (torch.tensor(column).unsqueeze(0) for column in zip(*TOKENS, strict=True))
    mask = torch.ones_like(ratio)
    for switch, expected in ((False, of_ppo), (True, of_aepo)):
        log_prob = ratio.log().requires_grad_()
        config = actor_config(enable_entropy_balanced_clipping=switch)
        loss, metrics = compute_policy_loss_aepo(
            torch.zeros_like(ratio), log_prob, advantages, mask, "token-sum", config
        )
        loss.backward()
        torch.testing.assert_close(log_prob.grad, expected)
        values = [max(-a * r, -a * min(max(r, 0.8), 1.28)) for r, a, *_ in TOKENS]
        values[5] = 10.0
        assert loss.item() == pytest.approx(sum(values))
        assert metrics.get("actor/aepo/kept_alive") == (pytest.approx(1 / 7) if switch else None)


# ---- AEPO: the loss ----


def slow_token_loss(log_prob, old, advantage, z, config):
    """A token's loss, autograd's own operations only; log_prob is a scalar tensor."""
    if config.enable_entropy_balanced_advantage:
        advantage *= max(0.0, 1 + config.entropy_advantage_coef * z)
    ratio = (log_prob - old).exp()
    upper = ratio.new_tensor(1 + config.clip_ratio_high)
    if config.enable_entropy_balanced_clipping:
        upper = upper * ratio / ratio.detach()
    clipped = upper if ratio > upper else torch.clamp(ratio, min=1 - config.clip_ratio_low)
    loss = -advantage * ratio if -advantage * ratio >= -advantage * clipped else -advantage * clipped
    worst = ratio.new_tensor(-advantage * config.clip_ratio_c)
    return worst if advantage < 0 and loss > worst else loss


@pytest.mark.parametrize("clipping", [True, False])
@pytest.mark.parametrize("advantage", [True, False])
@pytest.mark.parametrize("seed", range(2))
def test_the_loss_and_its_gradient_token_by_token(seed, clipping, advantage):
    switches = {"enable_entropy_balanced_clipping": clipping, "enable_entropy_balanced_advantage": advantage}
    config = actor_config(**switches, entropy_advantage_coef=0.5, clip_ratio_c=3.0)
    entropy, mask, old, new, advantages = random_batch(seed)
    z, _ = standardise_entropy(entropy, mask)
    with STANDARDISED_ENTROPY.given(z):
        loss, metrics = compute_policy_loss_aepo(old, new, advantages, mask, "token-mean", config)
    slow = new.detach().clone().requires_grad_()
    terms = [
        slow_token_loss(slow[i, t], old[i, t], advantages[i, t].item(), z[i, t].item(), config)
        for i, t in mask.nonzero().tolist()
    ]
    expected = torch.stack(terms).mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(new.grad, slow.grad, rtol=1e-4, atol=1e-6)
    assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_with_both_mechanisms_off_it_is_upstreams_loss(mode, weighted):
    _, mask, old, new, advantages = random_batch(3)
    weights = torch.rand(mask.shape, generator=torch.Generator().manual_seed(0)) if weighted else None
    arguments = (old, new, advantages, mask, mode, actor_config(), weights)
    (loss, metrics), (expected, expected_metrics) = (f(*arguments) for f in (LOSS, compute_policy_loss_vanilla))
    assert loss.item() == expected.item() and metrics == expected_metrics
    assert torch.equal(torch.autograd.grad(loss, new)[0], torch.autograd.grad(expected, new)[0])


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_balanced_clipping_keeps_upstreams_value(mode):
    _, mask, old, new, advantages = random_batch(4)
    arguments = (old, new, advantages, mask, mode, actor_config(enable_entropy_balanced_clipping=True))
    (loss, _), (expected, _) = (f(*arguments) for f in (LOSS, compute_policy_loss_vanilla))
    assert loss.item() == expected.item()
    revived = torch.autograd.grad(loss, new)[0] != torch.autograd.grad(expected, new)[0]
    above = mask.bool() & (advantages > 0) & ((new - old).exp() > 1.28)
    assert torch.equal(revived, above) and above.any()


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_the_gradient_does_not_depend_on_the_micro_batches(mode):
    entropy, mask, old, new, advantages = random_batch(5)
    z, _ = standardise_entropy(entropy, mask)
    config = actor_config(enable_entropy_balanced_clipping=True, enable_entropy_balanced_advantage=True)
    config.global_batch_info.update(dp_size=1, batch_num_tokens=mask.sum().item(), global_batch_size=len(mask))
    gradients = []
    for size in (1, 5, 12):
        new.grad = None
        for rows in torch.arange(len(mask)).split(size):
            with STANDARDISED_ENTROPY.given(z[rows]):
                LOSS(old[rows], new[rows], advantages[rows], mask[rows], mode, config)[0].backward()
        gradients.append(new.grad.clone())
    assert torch.isfinite(gradients[0]).all() and gradients[0].abs().max() > 0
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0], rtol=1e-5, atol=1e-8)


def test_extreme_log_probs_have_finite_gradients():
    log_ratio = torch.tensor([[-1e4, -30.0, 30.0, 1e4, 0.0]], requires_grad=True)
    config = actor_config(enable_entropy_balanced_clipping=True)
    for advantages in (torch.ones(1, 5), -torch.ones(1, 5)):
        log_ratio.grad = None
        loss, _ = LOSS(torch.zeros(1, 5), log_ratio, advantages, torch.ones(1, 5), "token-mean", config)
        loss.backward()
        assert torch.isfinite(loss) and torch.isfinite(log_ratio.grad).all()


def test_without_the_entropy_the_loss_says_what_is_missing():
    _, mask, old, new, advantages = random_batch(6)
    config = actor_config(enable_entropy_balanced_advantage=True)
    with pytest.raises(RuntimeError, match="standardised_entropy: use the ARPO trainer"):
        LOSS(old, new, advantages, mask, "token-mean", config)


def test_the_names_are_registered():
    assert get_adv_estimator_fn("arpo_hard") is compute_arpo_hard_advantage
    assert get_policy_loss_fn("aepo") is compute_policy_loss_aepo


# ---- config ----


@pytest.mark.parametrize("switch", ["enable_entropy_balanced_clipping", "enable_entropy_balanced_advantage"])
def test_a_switch_needs_the_loss(switch):
    assert getattr(actor_config(**{switch: True}), switch)
    with pytest.raises(ValueError, match=f"loss_mode=vanilla does not know {switch}"):
        actor_config(loss_mode="vanilla", **{switch: True})
    actor_config(loss_mode="vanilla")


@pytest.mark.parametrize("coef", [-0.1, 1.5, math.nan])
def test_a_bad_coefficient_is_named(coef):
    with pytest.raises(ValueError, match="actor.entropy_advantage_coef"):
        actor_config(entropy_advantage_coef=coef)
