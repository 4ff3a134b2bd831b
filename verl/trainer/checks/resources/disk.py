"""Checks the run's folder: its free space, and that all workers see it; and the free shared memory."""

import math
import os
import shutil
import time
import uuid
from contextlib import suppress
from functools import partial
from pathlib import Path

import ray
from omegaconf import DictConfig, OmegaConf
from verl.utils.torch_dtypes import PrecisionType

from verl.trainer.checkpoint_marker import complete_steps
from verl.trainer.checks.resources.parameters import count_parameters, load_hf_config, lora_parameters
from verl.utils.fault_reports import RunError
from verl.workers.config.keys import ROLLOUT

BUCKET = f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes"
# On GPUs the room for the shared memory of a GPU's processes: NCCL takes about 10 MB for each pair of processes and
# direction. A Docker container has 64 MB in all, unless it is told otherwise.
MEGABYTES_PER_GPU = 64
GB = 1e9
# Network file systems may cache a folder's listing for up to a minute.
SEEN_SECONDS = 70.0


def check_disk(config: DictConfig) -> None:
    """Check that the run can write into its folders, and that the first checkpoints fit, up to the number kept."""
    for key in ("default_local_dir", "rollout_data_dir", "validation_data_dir"):
        there = _existing(path := config.trainer.get(key) or ".")
        if not there.is_dir() or not os.access(there, os.W_OK):
            raise ValueError(f"trainer.{key}={path}: nothing can be written into {there}")
    size, number, free = disk_plan(config)
    if size * number > free:
        raise ValueError(
            f"trainer.default_local_dir={config.trainer.default_local_dir}: {free / GB:.1f} GB are free there, and the "
            f"run will write {number} checkpoint(s) of {size / GB:.1f} GB; trainer.max_actor_ckpt_to_keep limits them"
        )


def disk_plan(config: DictConfig) -> tuple[float, int, int]:
    """Return the bytes of a checkpoint (0: unknown), the number of checkpoints to come, and the free bytes of the disk.
    A checkpoint holds the weights and Adam's two states in the type of the weights (12 bytes a parameter in fp32), with
    LoRA the states of its factors alone; a critic's are not counted."""
    trainer, number = config.trainer, 0
    if trainer.save_freq > 0:
        there, steps = complete_steps(trainer.default_local_dir), trainer.get("total_training_steps")
        done = there[-1] if there and trainer.resume_mode == "auto" else 0
        number = max(1, -(-(steps - done) // trainer.save_freq)) if steps else 1
        kept = trainer.get("max_actor_ckpt_to_keep") or 0
        kept = kept if kept > 0 else number + len(there)  # upstream keeps all
        number = max(1, min(number, kept - len(there))) if not steps or steps > done else 0
    actor, (parameters, factors, _) = config.actor_rollout_ref.actor, _sizes(config.actor_rollout_ref.model)
    states = 2 * (factors or parameters) * ("optimizer" in actor.checkpoint.save_contents)
    size = _itemsize(actor) * ((parameters + factors) * ("model" in actor.checkpoint.save_contents) + states)
    return size, number, shutil.disk_usage(_existing(trainer.default_local_dir)).free


def check_shared_memory(config: DictConfig, folder: str = "/dev/shm") -> None:
    """Check that this machine's shared memory has room for each worker's weights on CPUs, and for NCCL on several GPUs.
    A process that writes beyond the room is killed by SIGBUS, without a message."""
    workers = config.trainer.n_gpus_per_node
    if config.trainer.device == "cpu":
        parameters, _, tied_head = _sizes(config.actor_rollout_ref.model)
        sent = (parameters + tied_head) * _itemsize(config.actor_rollout_ref.actor) / 2**20
        megabytes = math.ceil(min(sent, OmegaConf.select(config, BUCKET)) * workers)
        use = f"the weights ({BUCKET})"
    else:
        megabytes, use = MEGABYTES_PER_GPU * workers * (workers > 1), f"{workers} GPUs (NCCL)"
    if Path(folder).exists() and (free := shutil.disk_usage(folder).free / 2**20) < megabytes:
        raise ValueError(
            f"{folder} has {free:.0f} MB free, and {use} need {megabytes} MB there: remove old files there, or make it "
            "larger, as by docker run --shm-size=1g"
        )


def _sizes(model: DictConfig) -> tuple[int, int, int]:
    """Return the numbers of a model's parameters, of its LoRA factors, and of a tied head's, which vLLM gets as a
    tensor of its own; all 0 if they cannot be computed."""
    try:
        hf_config = load_hf_config(model)
        parameters, factors = count_parameters(hf_config), lora_parameters(hf_config, model)
        text = hf_config.get_text_config()
    except Exception:  # noqa: BLE001 - such a model may still train
        return 0, 0, 0
    return parameters, factors, text.vocab_size * text.hidden_size * bool(getattr(text, "tie_word_embeddings", False))


def _itemsize(actor: DictConfig) -> int:
    return PrecisionType.to_dtype(actor.fsdp_config.get("model_dtype") or "fp32").itemsize


def _existing(path: str) -> Path:
    """Return the folder itself or its nearest parent that exists."""
    folder = Path(path).absolute()
    return next(each for each in (folder, *folder.parents) if each.exists())


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
            f"written there on {ray.util.get_node_ip_address()}; choose one that is (docs/several_nodes.md)"
        )


def _node_and_view(token: Path, seconds: float, worker) -> tuple[str, bool]:
    """Return a worker's node, and whether it sees the file; a network file system may show it late."""
    end = time.monotonic() + seconds
    while True:
        with suppress(OSError):
            list(token.parent.iterdir())  # without this, a network file system may answer from its cache
        if (seen := os.path.exists(token)) or time.monotonic() >= end:
            return ray.util.get_node_ip_address(), seen
        time.sleep(1)
