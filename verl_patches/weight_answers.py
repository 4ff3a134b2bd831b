"""Ends the wait of a worker that sends weights to an engine which does not answer.

verl 0.9.1 sends buckets of weights by a socket and waits for the engine's answer to each without a limit
(`bucketed_weight_transfer.py`). If loading a bucket raises, the engine never answers, while the call that asked it to
load weights holds the exception. `watch_answers` lets the sender look at that call, and `remember_calls` lets the
server adapter keep it. Both can go when upstream's sender has a limit and looks at the call.
"""

import functools
import time
from types import ModuleType
from typing import Any

import ray
import zmq

from verl.utils.fault_reports import cause_of

POLL_SECONDS = 1.0
# the longest wait for an answer to one bucket; loading a bucket takes seconds
ANSWER_SECONDS = 600.0

# socket address -> the engine's call that receives weights there, in this process
_calls: dict[str, ray.ObjectRef] = {}


class AnswerSocket:
    """A zmq REQ socket that raises where the engine takes or answers nothing; everything else is the socket's own.

    Args:
        socket: the bound socket of a `BucketedWeightSender`.
        address: the sender's address, under which the engine's call was remembered.

    Both methods raise
        RuntimeError: the engine's call has ended; its exception, if it has one, is the cause.
        TimeoutError: nothing happened for `ANSWER_SECONDS`.
    """

    def __init__(self, socket, address: str):
        self._socket, self._call = socket, _calls.get(address)

    def send_pyobj(self, message: Any) -> None:
        """Send a message as soon as the engine has connected."""
        self._wait_for(zmq.POLLOUT)
        self._socket.send_pyobj(message)

    def recv(self) -> bytes:
        """Return the engine's answer."""
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
                if self._socket.poll(POLL_SECONDS * 1000, event):  # the last answer was on its way
                    return
                raise RuntimeError("the engine stopped taking weights before it had all of them")
            if time.monotonic() > end:
                raise TimeoutError(f"the engine gave no answer to weights for {ANSWER_SECONDS:g} s")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)


def watch_answers(bucketed_weight_transfer: ModuleType) -> None:
    """Let `BucketedWeightSender` wait by an `AnswerSocket`."""
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
    """Let `ServerAdapter` remember the calls that it makes without waiting for them, of which the last one counts."""
    adapter = vllm_rollout.ServerAdapter
    execute = adapter._execute_method

    @functools.wraps(execute)
    async def execute_method(self, method: str, non_block: bool = False, *args, **kwargs):
        result = await execute(self, method, non_block, *args, **kwargs)
        if non_block and result is not None:
            _calls[self.zmq_handle] = result
        return result

    adapter._execute_method = execute_method
