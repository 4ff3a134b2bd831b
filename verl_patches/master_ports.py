"""Chooses the port at which a worker group's processes meet among those that no other socket gets by chance.

verl 0.9.1 lets the system name a free port and listens there seconds later, when the system may have given it to
another socket, of this run or of one beside it: "address already in use". This can go when upstream holds the port.
"""

import functools
import secrets
from types import ModuleType

PORTS = range(20_000, 30_000)  # above Ray's workers', below those of Kubernetes and Linux's ip_local_port_range
PORTS_TO_TRY = 100


def choose_master_ports(ray_base: ModuleType) -> None:
    """Let `RayWorkerGroup` look for a free port from a random one on. Seeds have no part in it, as two runs with the
    same seed may begin side by side."""
    group = ray_base.RayWorkerGroup
    ask_worker = group._get_master_addr_port

    @functools.wraps(ask_worker)
    def ask_for_port(self, pg, bundle_index=0, master_port_range=None):
        if master_port_range is None:
            first = secrets.choice(PORTS[:-PORTS_TO_TRY])
            master_port_range = [first, first + PORTS_TO_TRY]
        return ask_worker(self, pg, bundle_index, master_port_range)

    group._get_master_addr_port = ask_for_port
