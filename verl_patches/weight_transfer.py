"""Gives each run on a machine its own sockets for weights, and ends the wait for an engine that does not answer.

verl 0.9.1 sends buckets of weights to its vLLM servers by a socket (`bucketed_weight_transfer.py`). It names the
sockets in /tmp by Ray's job id, replica and rank. Every run that starts its own Ray has the job id 01000000, so the
second run on a machine takes over the first one's socket while weights are sent: one of them waits forever, or a server
gets the other run's weights. Both ends are processes of the same raylet, whose process id is in their environment.

It also waits without a limit for the engine's answer to each bucket. If loading one raises, the engine never answers,
and the exception is only in the call that told it to load weights, which the server adapter has made.

This can go when upstream's names contain the session, and its sender has a limit and checks the call.
"""

import functools
import os
import time
from types import ModuleType
from typing import Any

import ray
import zmq

from verl.utils.fault_reports import cause_of

SUFFIX = ".sock"
POLL_SECONDS = 1.0
# longest wait for the answer to one bucket; loading a bucket takes seconds
ANSWER_SECONDS = 600.0

# upstream's socket address -> this process's call that lets the engine receive weights there
_calls: dict[str, ray.ObjectRef] = {}


class AnswerSocket:
    """The bound socket of a `BucketedWeightSender`, which raises if the engine's call has ended, or if the engine does
    not take or answer a message for `ANSWER_SECONDS`."""

    def __init__(self, socket, address: str):
        self._socket, self._call = socket, _calls.get(address)

    def send_pyobj(self, message: Any) -> None:
        self._wait_for(zmq.POLLOUT)
        self._socket.send_pyobj(message)

    def recv(self) -> bytes:
        self._wait_for(zmq.POLLIN)
        return self._socket.recv()

    def _wait_for(self, event: int) -> None:
        end = time.monotonic() + ANSWER_SECONDS
        while not self._socket.poll(POLL_SECONDS * 1000, event):
            if self._call is not None and ray.wait([self._call], timeout=0)[0]:
                try:
                    ray.get(self._call)
                except Exception as error:
                    raise RuntimeError(f"the engine did not take the new weights: {cause_of(error)}") from error
                if self._socket.poll(POLL_SECONDS * 1000, event):  # the last answer has just arrived
                    return
                raise RuntimeError("the engine stopped taking weights before it had all of them")
            if time.monotonic() > end:
                raise TimeoutError(f"the engine gave no answer to weights for {ANSWER_SECONDS:g} s")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)


def watch_transfers(bucketed_weight_transfer: ModuleType) -> None:
    """Add the run to the names of both ends' sockets, and let the sender use an `AnswerSocket`."""
    sender = bucketed_weight_transfer.BucketedWeightSender
    for end in (sender, bucketed_weight_transfer.BucketedWeightReceiver):

        def init(self, zmq_handle: str, *args, start=end.__init__, **kwargs):
            self.adapters_address = zmq_handle
            if raylet := os.environ.get("RAY_RAYLET_PID"):
                zmq_handle = f"{zmq_handle.removesuffix(SUFFIX)}-raylet-{raylet}{SUFFIX}"
            start(self, zmq_handle, *args, **kwargs)

        end.__init__ = init
    bind = sender._init_socket

    @functools.wraps(bind)
    def init_socket(self):
        bind(self)
        self.socket = AnswerSocket(self.socket, self.adapters_address)

    sender._init_socket = init_socket


def remember_calls(vllm_rollout: ModuleType) -> None:
    """Let `ServerAdapter` store, under its socket's address, the last call that it did not wait for (`non_block`)."""
    adapter = vllm_rollout.ServerAdapter
    execute = adapter._execute_method

    @functools.wraps(execute)
    async def execute_method(self, method: str, non_block: bool = False, *args, **kwargs):
        result = await execute(self, method, non_block, *args, **kwargs)
        if non_block and result is not None:
            _calls[self.zmq_handle] = result
        return result

    adapter._execute_method = execute_method
