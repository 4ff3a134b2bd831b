"""Checks that all of a run's workers see the run's folder, to which each writes its part of a checkpoint."""

import time
import uuid
from contextlib import suppress
from functools import partial
from pathlib import Path

import ray

from verl.utils.fault_reports import RunError

# Network file systems may cache a folder's listing for up to a minute.
SEEN_SECONDS = 70.0


def check_shared_folder(workers: list, run_dir: str | Path, seconds: float = SEEN_SECONDS) -> None:
    """Write a file into the run's folder, and let the Ray actors that write checkpoints look for it; raise RunError
    with the nodes of those that do not see it within these seconds."""
    token = Path(run_dir) / f".seen_by_workers_{uuid.uuid4().hex}"
    token.parent.mkdir(parents=True, exist_ok=True)
    token.touch()
    try:
        seen = ray.get([worker.__ray_call__.remote(partial(_node_and_view, token, seconds)) for worker in workers])
    finally:
        token.unlink()
    if blind := sorted({node for node, sees in seen if not sees}):
        raise RunError(
            f"trainer.default_local_dir={run_dir} is not shared: workers on {', '.join(blind)} do not see what is "
            f"written there on {ray.util.get_node_ip_address()}, so that a checkpoint would lack their parts; choose a "
            "folder on a file system that all nodes share (docs/several_nodes.md), or trainer.save_freq=-1"
        )


def _node_and_view(token: Path, seconds: float, worker) -> tuple[str, bool]:
    """Return a worker's node, and whether it sees the file; a network file system may show it late."""
    end = time.monotonic() + seconds
    while True:
        with suppress(OSError):
            list(token.parent.iterdir())  # without this, a network file system may answer from its cache
        if (seen := token.exists()) or time.monotonic() >= end:
            return ray.util.get_node_ip_address(), seen
        time.sleep(1)
