"""Blocks of one domain, every epoch another order, and resuming inside an epoch."""

from itertools import islice

import pytest
from torchdata.stateful_dataloader import StatefulDataLoader

from recipe.hato.meta_component import DomainSampler

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
