"""Meta-learning's formulas on quadratics solved by hand, and blocks of one domain that resume within an epoch."""

from itertools import islice

import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from recipe.hato.meta_component import DomainSampler
from recipe.hato.meta_learning import MetaEpisode, episode_calls


def quadratic_step(theta: torch.Tensor, optimizer, target: float) -> None:
    """Take a step on the loss (theta - target)^2 / 2, whose gradient is theta - target."""
    optimizer.zero_grad()
    ((theta - target) ** 2 / 2).sum().backward()
    optimizer.step()


def test_reptile_on_a_quadratic():
    """Two SGD steps of 0.5 from 0 towards 8: 4, 6. A tenth of the way: 0.6."""
    theta = torch.nn.Parameter(torch.tensor([0.0]))
    sgd = torch.optim.SGD([theta], lr=0.5)
    episode = MetaEpisode(sgd, method="reptile", meta_lr=0.1)
    quadratic_step(theta, sgd, 8.0)
    quadratic_step(theta, sgd, 8.0)
    assert theta.item() == 6.0 and episode.distance_squared() == 36.0
    episode.end()
    assert theta.item() == pytest.approx(0.6)


def test_maml_on_a_quadratic():
    """Inner rate 0.25 from 0 towards 8: 2, 3.5. Gradients there towards 8 and 4: -4.5, -0.5; mean -2.5. One SGD step
    of 0.5 from 0: 1.25."""
    theta = torch.nn.Parameter(torch.tensor([0.0]))
    sgd = torch.optim.SGD([theta], lr=0.5)
    episode = MetaEpisode(sgd, method="maml", inner_lr=0.25)
    quadratic_step(theta, sgd, 8.0)
    assert theta.item() == 2.0
    quadratic_step(theta, sgd, 8.0)
    assert theta.item() == 3.5
    episode.query()
    quadratic_step(theta, sgd, 8.0)
    quadratic_step(theta, sgd, 4.0)
    assert theta.item() == 3.5
    episode.end()
    assert theta.item() == 0.0 and theta.grad.item() == -2.5
    sgd.step()
    assert theta.item() == 1.25


def test_maml_leaves_adams_moments_to_the_outer_steps():
    theta = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    adam = torch.optim.AdamW([theta], lr=0.1, weight_decay=0.1)
    episode = MetaEpisode(adam, method="maml", inner_lr=0.25)
    quadratic_step(theta, adam, 8.0)
    assert not adam.state and torch.equal(theta, torch.tensor([2.75, 3.5]))  # no decay either
    episode.query()
    quadratic_step(theta, adam, 8.0)
    episode.end()
    adam.step()
    assert adam.state[theta]["step"] == 1
    torch.testing.assert_close(adam.state[theta]["exp_avg"], 0.1 * torch.tensor([-5.25, -4.5]))
    quadratic_step(theta, adam, 8.0)  # after the episode the optimizer is its own again
    assert adam.state[theta]["step"] == 2


def test_frozen_parameters_and_ones_without_gradient_stay():
    used, unused, frozen = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
    frozen.requires_grad_(False)
    sgd = torch.optim.SGD([used, unused, frozen], lr=0.5)
    episode = MetaEpisode(sgd, method="maml", inner_lr=0.5)
    assert len(episode.start) == 2
    episode.query()
    quadratic_step(used, sgd, 3.0)
    episode.end()
    sgd.step()
    assert torch.equal(used, torch.full((2,), 2.0)) and torch.equal(unused, torch.ones(2)) and unused.grad is None


def test_bfloat16_is_rounded_once():
    theta = torch.nn.Parameter(torch.tensor([1.0], dtype=torch.bfloat16))
    episode = MetaEpisode(torch.optim.SGD([theta]), method="reptile", meta_lr=0.3)
    theta.data.fill_(1.5)
    episode.end()
    assert theta.item() == torch.tensor(1.15).bfloat16().item()
    assert episode.distance_squared() == pytest.approx((theta.item() - 1) ** 2)


def test_episodes_tile_the_steps():
    calls = [episode_calls(step, "reptile", 3) for step in range(1, 7)]
    assert calls == [(["meta_begin"], []), ([], []), ([], ["meta_end"])] * 2
    assert episode_calls(1, "reptile", 1) == (["meta_begin"], ["meta_end"])


DOMAINS = ["a"] * 9 + ["b"] * 25 + ["c"] * 3


def blocks(sampler: DomainSampler) -> list[list[int]]:
    rows = list(sampler)
    assert len(rows) == len(sampler)
    return [rows[at : at + sampler.block] for at in range(0, len(rows), sampler.block)]


def test_a_block_is_of_one_domain_and_no_row_comes_twice_but_in_small_domains():
    sampler = DomainSampler(DOMAINS, block=8, seed=1)
    epochs = [blocks(sampler) for _ in range(3)]
    for epoch in epochs:
        domains = [{DOMAINS[row] for row in block} for block in epoch]
        assert all(len(domain) == 1 for domain in domains)
        assert sorted(domain.pop() for domain in domains) == ["a", "b", "b", "b", "c"]
        rows = [row for block in epoch for row in block if DOMAINS[row] != "c"]
        assert len(rows) == len(set(rows))
        assert {row for block in epoch for row in block if DOMAINS[row] == "c"} == {34, 35, 36}
    assert epochs[0] != epochs[1] != epochs[2]
    assert blocks(DomainSampler(DOMAINS, block=8, seed=1)) == epochs[0]
    assert blocks(DomainSampler(DOMAINS, block=8, seed=2)) != epochs[0]


@pytest.mark.parametrize("seen", [1, 7, 20, 21, 33])
def test_resuming_goes_on_where_it_stopped(seen):
    def loader():
        sampler = DomainSampler(DOMAINS, block=8, seed=1)
        return StatefulDataLoader(list(range(len(DOMAINS))), batch_size=2, sampler=sampler, num_workers=0)

    def forever(of):
        while True:
            yield from (batch.tolist() for batch in of)

    whole = loader()
    batches = forever(whole)
    list(islice(batches, seen))
    state = whole.state_dict()
    resumed = loader()
    resumed.load_state_dict(state)
    assert list(islice(forever(resumed), 50)) == list(islice(batches, 50))
