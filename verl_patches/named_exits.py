"""Names exceptions of workers and of TransferQueue's threads that are no `Exception`.

verl 0.9.1 lets SystemExit and KeyboardInterrupt of a worker's method through to Ray, which takes the first for an end
on purpose and the second for a cancelled call. TransferQueue 0.1.11 catches only `Exception` in the loops of its
threads: after anything else no request is answered, and the run waits. This can go when both catch every exception.
"""

import functools
import inspect
import os
from types import ModuleType

import ray
import zmq

from verl.utils.fault_reports import cause_of, report_fault
from verl.utils.user_code import guarded, no_exit

# Classes with threads, and the methods that these run.
THREADS = {
    "TransferQueueController": ("_process_request", "_wait_connection"),
    "SimpleStorageUnit": ("_worker_routine", "_proxy_routine"),
}


def name_exits(engine_workers: ModuleType) -> None:
    """Let the methods of upstream's workers that the trainer calls raise UserCodeExit in place of such exceptions."""
    from verl.single_controller.base.decorator import MAGIC_ATTR

    for worker in (engine_workers.TrainingWorker, engine_workers.ActorRolloutRefWorker):
        for name, method in list(vars(worker).items()):
            if hasattr(method, MAGIC_ATTR):
                setattr(worker, name, named(method, f"{worker.__name__}.{name}"))


def named(method, name: str):
    """Return the method, or coroutine function, with every exception of it an `Exception`."""

    @functools.wraps(method)
    def call(*args, **kwargs):
        with no_exit(name):
            return method(*args, **kwargs)

    @functools.wraps(method)
    async def call_later(*args, **kwargs):
        return await guarded(method(*args, **kwargs), name)

    return call_later if inspect.iscoroutinefunction(method) else call


def report_threads(module: ModuleType) -> None:
    """Let TransferQueue's classes report to the driver what ends their threads."""
    for class_name, methods in THREADS.items():
        if actor := vars(module).get(class_name):
            owner = actor.__ray_metadata__.modified_class
            for method in methods:
                setattr(owner, method, reported(getattr(owner, method), class_name))


def reported(routine, class_name: str):
    """Return a thread's routine that reports its exception to the driver."""

    @functools.wraps(routine)
    def run(self):
        try:
            routine(self)
        except zmq.ZMQError:  # the sockets have been closed, at the end of the run
            raise
        except BaseException as error:
            process = f"process {os.getpid()} on {ray.util.get_node_ip_address()}"
            report_fault(f"TransferQueue's {class_name} ({process}) answers no more: {cause_of(error)}")
            raise

    return run
