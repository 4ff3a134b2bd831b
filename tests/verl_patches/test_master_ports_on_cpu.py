"""The ports from which a worker group looks for a free one, recorded by a fake group."""

from pathlib import Path
from types import SimpleNamespace

from verl.single_controller.ray.base import RayWorkerGroup

from verl_patches.master_ports import PORTS, choose_master_ports


def test_upstreams_group_is_wrapped():
    assert "choose_master_ports" in RayWorkerGroup._get_master_addr_port.__code__.co_qualname


def test_the_ports_are_random_ones_that_linux_does_not_give_out():
    class Group:
        def _get_master_addr_port(self, pg, bundle_index=0, master_port_range=None):
            return master_port_range

    choose_master_ports(SimpleNamespace(RayWorkerGroup=Group))
    ranges = [Group()._get_master_addr_port(None, bundle_index=0, master_port_range=None) for _ in range(20)]
    assert all(PORTS[0] <= first < last <= PORTS[-1] for first, last in ranges)
    assert len({first for first, _ in ranges}) > 10
    given_out = range(*map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()))
    assert PORTS[-1] < given_out[0] or given_out[-1] < PORTS[0]
    assert Group()._get_master_addr_port(None, master_port_range=[5000, 5001]) == [5000, 5001]
