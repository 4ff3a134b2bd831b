"""Reports to the driver the exceptions of workers and of TransferQueue's threads that are no `Exception`.

verl 0.9.1 lets SystemExit and KeyboardInterrupt of a worker's method through to Ray, which takes the first for an end
on purpose and the second for a cancelled call. TransferQueue 0.1.11 catches only `Exception` in the loops of its
threads: after anything else no request is answered, and the run waits. This can go when both catch every exception.
"""

import functools
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType

import ray

from verl.utils.fault_reports import report_fault

THREADS = ("_process_request", "_wait_connection", "_worker_routine", "_proxy_routine")
CLASSES = ("TrainingWorker", "ActorRolloutRefWorker", "TransferQueueController", "SimpleStorageUnit")


def report_exits(module: ModuleType) -> None:
    """Let the methods that the trainer calls, and those that run in threads, report what is no `Exception`."""
    from verl.single_controller.base.decorator import MAGIC_ATTR

    for class_name in CLASSES:
        if (actor := vars(module).get(class_name)) is not None:
            owner = actor.__ray_metadata__.modified_class if hasattr(actor, "__ray_metadata__") else actor
            for name, method in inspect.getmembers(owner, inspect.isfunction):
                if name in THREADS or hasattr(method, MAGIC_ATTR):
                    setattr(owner, name, reporting(method, f"{class_name}.{name}"))


def reporting(method: Callable, name: str) -> Callable:
    """Return the method, or coroutine function, which reports such an exception by this name and raises it again."""

    @contextmanager
    def report() -> Iterator[None]:
        try:
            yield
        except (Exception, GeneratorExit):
            raise
        except BaseException as error:
            node = ray.util.get_node_ip_address()
            report_fault(f"{name} (process {os.getpid()} on {node}) raised {error!r}")
            raise

    @functools.wraps(method)
    def call(*args, **kwargs):
        with report():
            return method(*args, **kwargs)

    @functools.wraps(method)
    async def call_later(*args, **kwargs):
        with report():
            return await method(*args, **kwargs)

    return call_later if inspect.iscoroutinefunction(method) else call
