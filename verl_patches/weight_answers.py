"""Ends the wait of a worker that sends weights to an engine which does not answer.

verl 0.9.1 sends buckets of weights by a socket and waits without a limit for the engine's answer to each
(`bucketed_weight_transfer.py`). If loading a bucket raises, the engine never answers, and the exception is only in the
call that told it to load weights. `watch_answers` lets the sender check that call, and `remember_calls` lets the server
adapter store it. Both can go when upstream's sender has a limit and checks the call.
"""

import functools
import time
from types import ModuleType
from typing import Any

import ray
import zmq

from verl.utils.fault_reports import cause_of

POLL_SECONDS = 1.0
# longest wait for the answer to one bucket; loading a bucket takes seconds
ANSWER_SECONDS = 600.0

# socket address -> this process's call that lets the engine receive weights there
_calls: dict[str, ray.ObjectRef] = {}


class AnswerSocket:
    """The bound socket of a `BucketedWeightSender`, which raises if the engine's call, which `remember_calls` has
    stored under the sender's address, has ended, or if the engine does not take or answer a message for
    `ANSWER_SECONDS`."""

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


def watch_answers(bucketed_weight_transfer: ModuleType) -> None:
    """Let `BucketedWeightSender` use an `AnswerSocket`, which ends a hopeless wait."""
    sender = bucketed_weight_transfer.BucketedWeightSender
    start, bind = sender.__init__, sender._init_socket

    @functools.wraps(start)
    def init(self, zmq_handle: str, *args, **kwargs):
        start(self, zmq_handle, *args, **kwargs)
        self.adapters_address = zmq_handle

    @functools.wraps(bind)
    def init_socket(self):
        bind(self)
        self.socket = AnswerSocket(self.socket, self.adapters_address)

    sender.__init__, sender._init_socket = init, init_socket


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
