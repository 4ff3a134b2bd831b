"""Gives each run on a machine its own sockets for sending weights to its vLLM servers."""

import os
from types import ModuleType

SUFFIX = ".sock"


def keep_runs_apart(bucketed_weight_transfer: ModuleType) -> None:
    """Add the run to the names of the sockets through which workers send weights to their vLLM servers.

    verl 0.9.1 names them in /tmp by Ray's job id, replica and rank. Every run that starts its own Ray has the job id
    01000000, so the second run on a machine takes over the first one's socket while weights are sent: one of them waits
    forever, or a server gets the other run's weights. Both ends are processes of the same raylet, whose process id is
    in their environment. This can go when upstream's names contain the session.
    """
    for name in ("BucketedWeightSender", "BucketedWeightReceiver"):
        upstream = getattr(bucketed_weight_transfer, name)

        def init(self, zmq_handle: str, *args, start=upstream.__init__, **kwargs):
            if raylet := os.environ.get("RAY_RAYLET_PID"):
                zmq_handle = f"{zmq_handle.removesuffix(SUFFIX)}-raylet-{raylet}{SUFFIX}"
            start(self, zmq_handle, *args, **kwargs)

        upstream.__init__ = init
