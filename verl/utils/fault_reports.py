"""Tells a run's driver of a fault that ends the run, from any process of the run's Ray job, and of signs of life."""

import os
import re
import time

import ray
from ray.experimental import internal_kv

REPORTS, SIGNS = "verl_faults", "verl_signs_of_life"


class RunError(RuntimeError):
    """The run cannot go on; the message names the first cause. The launcher prints it instead of other exceptions."""


def report_fault(text: str) -> None:
    """Report a fault to the driver; `verl.trainer.death_watch` prints the text after `error: ` and ends the run."""
    if not ray.is_initialized():  # Without Ray no other process waits.
        return
    internal_kv._internal_kv_put(f"{ray.get_runtime_context().get_job_id()}:{text}", b"", namespace=REPORTS)


def reported_faults() -> list[str]:
    """Return the texts that processes of this job have reported."""
    if not ray.is_initialized():
        return []
    job = f"{ray.get_runtime_context().get_job_id()}:"
    return [key.decode().removeprefix(job) for key in internal_kv._internal_kv_list(job, namespace=REPORTS)]


def give_sign_of_life() -> None:
    """Let the driver know that this process, the only one of the job that does so, still runs Python code."""
    if ray.is_initialized():
        job, node = ray.get_runtime_context().get_job_id(), ray.util.get_node_ip_address()
        sign = f"{time.time()} process {os.getpid()} on {node}"
        internal_kv._internal_kv_put(job, sign.encode(), overwrite=True, namespace=SIGNS)


def last_sign_of_life() -> str | None:
    """Return the last sign of life of this job: time, process and node; None before the first."""
    if not ray.is_initialized():
        return None
    sign = internal_kv._internal_kv_get(ray.get_runtime_context().get_job_id(), namespace=SIGNS)
    return sign and sign.decode()


def cause_of(error: BaseException, characters: int = 500) -> str:
    """Return `Type: message` of an exception as one line of at most `characters` characters.

    If Ray wraps the exception of a worker, the line is about the original one, and the worker's process follows.
    """
    raised_in = ""
    while isinstance(inner := getattr(error, "cause", None), BaseException):
        # Ray's text has a head for each process through which the exception has passed, the first of them last.
        if heads := re.findall(r"ray::(\w+).*?\(pid=(\d+), ip=([^,)]+)", str(error)):
            raised_in = " (raised in {}, process {} on {})".format(*heads[-1])
        error = inner
    return " ".join(f"{type(error).__name__}: {error}".split())[:characters] + raised_in
