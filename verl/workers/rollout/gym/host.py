"""Runs environments of a user's class; a program of its own, which imports nothing of this project (see process.py).

The server imports the class once, and forks for each message on its control socket. A fork holds an instance and its
copies, and answers calls on the socket that came with the message. It ends with that socket, or with the server.
"""

import asyncio
import ctypes
import importlib
import inspect
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import Connection
from typing import Any

PR_SET_PDEATHSIG = 1
START_SECONDS = 120  # time limit for the import of a class


def load_class(class_path: str) -> type:
    """Return a class with `reset` and `step`, perhaps around a `gymnasium` environment; raise ValueError for others."""
    module, _, name = class_path.rpartition(".")
    try:
        cls = getattr(importlib.import_module(module), name)
    except Exception as error:  # a module may raise anything
        raise ValueError(f"{class_path}: {type(error).__name__}: {error}") from error
    gymnasium = sys.modules.get("gymnasium")
    if gymnasium is not None and isinstance(cls, type) and issubclass(cls, gymnasium.Env):
        return type(name, (Gymnasium,), {"make": cls} | ({"copy": Gymnasium.copied} if hasattr(cls, "copy") else {}))
    if missing := [method for method in ("reset", "step") if not callable(getattr(cls, method, None))]:
        raise ValueError(f"{class_path} has no {' and no '.join(missing)}")
    return cls


class Gymnasium:
    """A `gymnasium` environment with texts as observations and actions; the task goes to `reset` as `options`."""

    make: type

    def __init__(self, environment: Any = None):
        self.environment = self.make() if environment is None else environment

    def reset(self, task: Any, seed: int) -> str:
        return self.environment.reset(seed=seed, options=task)[0]

    def step(self, action: str) -> tuple[str, float, bool]:
        observation, reward, terminated, truncated, _ = self.environment.step(action)
        return observation, reward, terminated or truncated

    def copied(self) -> "Gymnasium":
        return type(self)(self.environment.copy())

    def close(self) -> None:
        self.environment.close()


def call(cls: type, instances: dict[int, Any], method: str, number: int, arguments: tuple) -> Any:
    """Call a method of an instance and return its result in plain types."""
    if method == "reset":
        instances[number] = cls()
        return checked_text(result_of(instances[number].reset(*arguments)), "reset")
    if method == "copy":
        instances[arguments[0]] = result_of(instances[number].copy())
        return None
    if method == "close":
        instance = instances.pop(number, None)
        return result_of(instance.close()) if hasattr(instance, "close") else None
    returned = result_of(instances[number].step(*arguments))
    if not isinstance(returned, tuple) or len(returned) != 3:
        raise TypeError(f"step returned {returned!r:.200}, expected (observation, reward, done)")
    observation, reward, done = returned
    return checked_text(observation, "step"), None if reward is None else float(reward), bool(done)


def result_of(value: Any) -> Any:
    """Return a method's result, also that of a coroutine function."""
    return event_loop().run_until_complete(value) if inspect.isawaitable(value) else value


@cache
def event_loop() -> asyncio.AbstractEventLoop:
    """Return the loop of this process, which is one instance's and its copies', so that connections outlast a call."""
    return asyncio.new_event_loop()


def checked_text(value: Any, method: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{method} returned the observation {value!r:.200}, expected a text")
    return value


def serve(pipe: Connection, cls: type) -> None:
    """Answer calls until the pipe is closed."""
    instances: dict[int, Any] = {}
    pipe.send(os.getpid())
    while True:
        try:
            request = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            answer = call(cls, instances, *request), None
        except Exception as error:
            answer = None, f"{type(error).__name__}: {error}"
        pipe.send(answer)


def main(
    control_fd: int,
    class_path: str,
    path: list[str],
    load: Callable[[str], Any] = load_class,
    serve: Callable[[Connection, Any], None] = serve,
) -> None:
    """Import what `load` returns, and fork for each message on the control socket; a fork calls `serve`."""
    sys.path[:] = path
    control = socket.socket(fileno=control_fd)
    signal.alarm(START_SECONDS)  # nobody waits any longer
    try:
        cls = load(class_path)
    except ValueError as error:
        control.send(json.dumps({"error": str(error)}).encode()[:60_000])
        return
    signal.alarm(0)
    control.send(json.dumps({"can_copy": hasattr(cls, "copy")}).encode())
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    server = os.getpid()
    while True:
        message, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        if os.fork() == 0:
            control.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == server:
                serve(Connection(fds[0]), cls)
            os._exit(0)
        os.close(fds[0])


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
