"""The value model against functions whose values are known, and its features against hand-computed numbers."""

import io
import math
import random
from itertools import product

import pytest
import torch

from recipe.hato.keys import HATOConfig
from recipe.hato.metrics import ReferencePaths, calibration_error, evenly_spaced, novelty, rdi
from recipe.hato.value_model import COMPARED_ROWS, value_model_of
from verl.workers.config.keys import read_keys

KINDS = ["ensemble", "dropout", "bootstrap", "none"]
F = 4


def make_value_model(kind: str, *, seed: int = 0, memory_size: int = 4096, **settings):
    config = {"uncertainty": {"method": kind} | settings, "memory": {"value_buffer_size": memory_size}}
    return value_model_of(read_keys(HATOConfig, config, "hato"), seed, F)


def known_value(features: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(6 * (features[:, 0] - features[:, 1]))


def steps(n: int, seed: int, low: float = 0.0, high: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Features in [low, high]; outcomes 0 or 1, drawn with the known value."""
    generator = torch.Generator().manual_seed(seed)
    features = low + (high - low) * torch.rand(n, F, generator=generator)
    return features, torch.bernoulli(known_value(features), generator=generator)


def trained(kind: str, seed: int = 0, low: float = 0.0, high: float = 1.0, **settings):
    model = make_value_model(kind, seed=seed, **settings)
    for batch in range(8):
        model.observe(*steps(128, seed=100 + batch, low=low, high=high))
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_learns_a_known_function(kind):
    features, _ = steps(500, seed=1)
    value, uncertainty = trained(kind).predict(features)
    assert value.shape == uncertainty.shape == (500,)
    error = (value - known_value(features)).square().mean().sqrt()
    spread = known_value(features).std()  # the error of the best constant, about 0.3
    assert error < 0.5 * spread
    assert (uncertainty == 0).all() if kind == "none" else (uncertainty > 0).all()


@pytest.mark.parametrize("kind", ["ensemble", "bootstrap"])
def test_uncertainty_is_larger_away_from_the_data(kind):
    for seed in range(3):
        model = trained(kind, seed, low=0.0, high=0.4)
        near, far = (model.predict(steps(300, 7, low, high)[0])[1] for low, high in ((0.0, 0.4), (0.7, 1.0)))
        assert far.mean() > 1.5 * near.mean()


@pytest.mark.parametrize("kind", KINDS)
def test_a_restored_model_goes_on_like_the_one_saved(kind):
    saved = trained(kind)
    file = io.BytesIO()
    torch.save(saved.state_dict(), file)
    file.seek(0)
    restored = make_value_model(kind, seed=99)
    restored.load_state_dict(torch.load(file, weights_only=True))
    features, _ = steps(50, seed=3)
    for _ in range(2):
        torch.testing.assert_close(restored.predict(features), saved.predict(features), rtol=0, atol=0)
        for model in (saved, restored):
            model.observe(*steps(64, seed=4))


@pytest.mark.parametrize("kind", KINDS)
def test_the_seed_decides_and_nothing_else_does(kind):
    features, _ = steps(50, seed=3)
    first = trained(kind, seed=5)
    torch.manual_seed(123)
    again = trained(kind, seed=5)
    again.predict(features[:7])  # earlier predictions change nothing
    torch.testing.assert_close(first.predict(features), again.predict(features), rtol=0, atol=0)
    assert not torch.equal(first.predict(features)[0], trained(kind, seed=6).predict(features)[0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_does_not_depend_on_who_else_is_asked(kind):
    model = trained(kind)
    features, _ = steps(5000, seed=3)
    alone = torch.cat([model.predict(features[[row]])[0] for row in (0, 2100, 4999)])
    torch.testing.assert_close(model.predict(features)[0][[0, 2100, 4999]], alone, rtol=1e-4, atol=1e-6)


def test_ensemble_value_and_uncertainty_are_mean_and_deviation_of_networks_computed_one_by_one():
    model = trained("ensemble", n_models=3)
    features, _ = steps(10, seed=3)

    def network(weights, biases, member):
        hidden = features
        for weight, bias in zip(list(weights)[:-1], list(biases)[:-1], strict=True):
            hidden = torch.relu(hidden @ weight[member] + bias[member])
        return hidden @ weights[-1][member] + biases[-1][member]

    nets = model.networks
    with torch.no_grad():
        own = [network(nets.weights, nets.biases, member) for member in range(3)]
        prior = [network(nets.prior_weights, nets.prior_biases, member) for member in range(3)]
        estimates = torch.sigmoid(torch.cat(own, 1) + torch.cat(prior, 1))
    value, uncertainty = model.predict(features)
    torch.testing.assert_close(value, estimates.mean(1))
    torch.testing.assert_close(uncertainty, estimates.std(1, correction=0))


def test_bootstrap_is_the_kernel_weighted_mean_written_out():
    model = make_value_model("bootstrap", n_passes=4)
    features, outcomes = steps(30, seed=2)
    model.observe(features, outcomes)
    query = features[0] + 0.1
    scale = 0.5 * features.std(0, correction=0)
    base = (outcomes.sum().item() + 1) / 32
    estimates = []
    for k in range(4):
        z = torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor((k + 0.5) / 4)).item()
        hits, count = 1 / (1 + math.exp(-math.log(base / (1 - base)) - z)), 1.0
        for row in range(30):
            distance = ((query - features[row]) / scale).square().mean().item()
            weight = math.exp(-distance / 2) * model.weights_MK[row, k].item()
            hits, count = hits + weight * outcomes[row].item(), count + weight
        estimates.append(hits / count)
    value, uncertainty = model.predict(query[None])
    assert value.item() == pytest.approx(sum(estimates) / 4, rel=1e-4)
    assert uncertainty.item() == pytest.approx(torch.tensor(estimates).std(correction=0).item(), rel=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_bounded_and_keeps_the_newest(kind):
    model = make_value_model(kind, memory_size=50, n_updates=1)
    for batch in range(6):
        features, outcomes = steps(12, seed=batch)
        model.observe(features, outcomes)
    assert len(model.features_MF) == len(model.outcomes_M) == len(model.weights_MK) == 50
    torch.testing.assert_close(model.features_MF[-12:], features)
    assert model.features_MF.untyped_storage().nbytes() == 50 * F * 4
    assert make_value_model("bootstrap", memory_size=10**6).memory_size == COMPARED_ROWS


def test_one_call_replaces_no_more_than_a_quarter_of_the_memory():
    model = make_value_model("ensemble", memory_size=40, n_updates=1)
    for batch in range(4):
        model.observe(*steps(10, seed=batch))
    before, (features, outcomes) = model.features_MF, steps(500, seed=9)
    model.observe(features, outcomes)
    torch.testing.assert_close(model.features_MF[:30], before[10:])
    places = [(features == row).all(1).nonzero().item() for row in model.features_MF[30:]]
    assert places == sorted(places) and len(set(places)) == 10 and max(places) > 100, "a random ten, in order"


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_seen_and_nothing_asked(kind):
    model = make_value_model(kind)
    value, uncertainty = model.predict(torch.zeros(0, F))
    assert value.shape == uncertainty.shape == (0,)
    value, _ = model.predict(steps(100, seed=0)[0])
    assert ((value > 0) & (value < 1)).all()
    model.observe(torch.zeros(0, F), [])
    model.observe([[0.1, 0.2, 0.3, 0.4]], [1.0])
    assert all(part.isfinite().all() for part in model.predict(torch.rand(5, F)))


def test_calibration_error_by_hand():
    """Bins [0, 0.5) with means 0.125 and 0.5, and [0.5, 1] with 0.95 and 0.5."""
    assert calibration_error([0.1, 0.15, 0.9, 1.0], [0, 1, 1, 0], n_bins=2) == pytest.approx((0.375 + 0.45) / 2)


@pytest.mark.parametrize("kind", ["ensemble", "dropout", "none"])
def test_networks_that_are_no_longer_finite_are_named_where_they_learn(kind):
    model = make_value_model(kind)
    next(model.networks.parameters()).data[0] = math.nan
    with pytest.raises(ValueError, match="HATO's value model gives estimates that are not finite"):
        model.observe(*steps(128, seed=1))


def slow_distance(a, b) -> float:
    """Levenshtein by the recurrence, over the longer length."""
    table = {(i, 0): i for i in range(len(a) + 1)} | {(0, j): j for j in range(len(b) + 1)}
    for i, j in product(range(1, len(a) + 1), range(1, len(b) + 1)):
        change = table[i - 1, j - 1] + (a[i - 1] != b[j - 1])
        table[i, j] = min(table[i - 1, j] + 1, table[i, j - 1] + 1, change)
    return table[len(a), len(b)] / max(len(a), len(b), 1)


@pytest.mark.parametrize("seed", range(10))
def test_rdi_and_novelty_against_the_slow_reference(seed):
    rng = random.Random(seed)
    paths, references = ([[rng.randrange(4) for _ in range(rng.randrange(1, 9))] for _ in range(6)] for _ in range(2))
    others = [[slow_distance(a, b) for j, b in enumerate(paths) if j != i] for i, a in enumerate(paths)]
    assert rdi(paths) == pytest.approx(sum(map(min, others)) / 6)
    nearest = [min(slow_distance(a, b) for b in references) for a in paths]
    assert novelty(paths, references) == pytest.approx(sum(nearest) / 6)


def test_of_many_paths_evenly_spaced_ones_are_compared():
    assert evenly_spaced(range(10), 4) == [0, 2, 5, 7]
    assert evenly_spaced(range(3), 4) == [0, 1, 2]
    assert rdi([[i] * 8 for i in range(1000)]) == 1.0
    assert rdi([[1, 2]]) is None and rdi([]) is None


def test_reference_paths_are_the_first_ones_and_bounded():
    references = ReferencePaths(max_problems=2, max_paths=2)
    references.keep("none yet", [])
    references.keep("a", [[1], [2], [3]])
    references.keep("a", [[4]])
    references.keep("b", [[5]])
    references.keep("c", [[6]])
    assert (references.of("a"), references.of("b"), references.of("c")) == ([[1], [2]], [[5]], [])
    again = ReferencePaths(2, 2)
    again.load_state_dict(references.state_dict())
    assert again.of("a") == [[1], [2]]
