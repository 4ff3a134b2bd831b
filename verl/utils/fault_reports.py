"""Tells a run's driver of a fault that ends the run, from any process of the run's Ray job."""

import re

import ray
from ray.experimental import internal_kv

REPORTS = "verl_faults"


class RunError(RuntimeError):
    """The run cannot go on; the message names the first cause. The launcher prints it instead of other exceptions."""


def report_fault(text: str) -> None:
    """Report a fault to the driver; `verl.trainer.watches` prints the text after `error: ` and ends the run."""
    if not ray.is_initialized():  # Without Ray no other process waits.
        return
    internal_kv._internal_kv_put(f"{ray.get_runtime_context().get_job_id()}:{text}", b"", namespace=REPORTS)


def reported_faults() -> list[str]:
    """Return the texts that processes of this job have reported."""
    if not ray.is_initialized():
        return []
    job = f"{ray.get_runtime_context().get_job_id()}:"
    return [key.decode().removeprefix(job) for key in internal_kv._internal_kv_list(job, namespace=REPORTS)]


def cause_of(error: BaseException, characters: int = 500) -> str:
    """Return `Type: message` of an exception as one line of at most `characters` characters. If Ray wraps the exception
    of a worker, the line is about the original one, and the worker's process follows."""
    raised_in = ""
    while isinstance(inner := getattr(error, "cause", None), BaseException):
        # Ray's text has a head for each process through which the exception has passed, the first of them last.
        if heads := re.findall(r"ray::(\w+).*?\(pid=(\d+), ip=([^,)]+)", str(error)):
            raised_in = " (raised in {}, process {} on {})".format(*heads[-1])
        error = inner
    return " ".join(f"{type(error).__name__}: {error}".split())[:characters] + raised_in
