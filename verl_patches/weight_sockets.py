"""Sockets for the weights of two runs on one machine."""

import os
from types import ModuleType

SUFFIX = ".sock"


def of_this_run(zmq_handle: str) -> str:
    """The socket's address with the process id of this node's raylet, which no other run's processes have in common."""
    raylet = os.environ.get("RAY_RAYLET_PID")
    return f"{zmq_handle.removesuffix(SUFFIX)}-raylet-{raylet}{SUFFIX}" if raylet else zmq_handle


def keep_runs_apart(bucketed_weight_transfer: ModuleType) -> None:
    """Give the sockets by which a worker sends weights to its vLLM servers names that two runs do not share.

    verl 0.9.1 names them in /tmp by Ray's job id, replica and rank. Every run that starts a Ray of its own has the job
    id 01000000, so that of two runs on a machine the second takes the first one's socket away while weights travel:
    one of them waits for ever, or a server gets the other run's weights. Both ends are processes of one node's raylet,
    which has told them its process id. This can go when upstream's names hold the session.
    """
    for name in ("BucketedWeightSender", "BucketedWeightReceiver"):
        upstream = getattr(bucketed_weight_transfer, name)

        def init(self, zmq_handle: str, *args, start=upstream.__init__, **kwargs):
            start(self, of_this_run(zmq_handle), *args, **kwargs)

        upstream.__init__ = init
