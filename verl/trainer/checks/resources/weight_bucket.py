"""Chooses and checks the size of the buckets in which the trainer sends its weights to vLLM.

The key is `actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes`; null lets this module choose.
A MB is 2^20 bytes here, as in upstream (verl 0.9.1), whose own default is 2,048 MB. On GPUs upstream sends a tensor
that is larger than a bucket by itself. On CPUs, where weights pass through shared memory, it ends the run instead.
"""

import math
import shutil
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from safetensors import safe_open
from verl.utils.torch_dtypes import PrecisionType

from verl.trainer.checks.model.settings import config_folder, model_json
from verl.workers.config.keys import ROLLOUT

KEY = f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes"
UPSTREAM_MEGABYTES = 2048
# A larger bucket would only take memory on CPUs: to copy this one takes far longer than the message about it.
MOST_ON_CPU = 256
# On GPUs the room for the shared memory of a GPU's processes: NCCL takes about 10 MB for each pair of processes and
# direction. A Docker container has 64 MB in all, unless it is told otherwise.
MEGABYTES_PER_GPU = 64
# Suffixes of the names of a model's output and input embeddings.
HEAD, EMBEDDINGS = "lm_head.weight", ("embed_tokens.weight", "wte.weight")


@dataclass(frozen=True)
class SentWeights:
    """Sizes in MB of a model's weights as the trainer sends them, and the name of the largest tensor."""

    total: float
    largest: float
    largest_name: str
    tied: bool

    def needed_on_cpu(self) -> int:
        """Return the smallest bucket that works on CPUs.

        vLLM's CPU build (0.30) refuses a tied head without its embeddings. The embeddings are sent first and the head
        last, so that all weights must fit.
        """
        return math.ceil(self.total if self.tied else self.largest)


def fill_weight_bucket(config: DictConfig) -> None:
    """Set the size if it is null: all weights, but no more than is useful, and upstream's size for unknown weights."""
    if OmegaConf.select(config, KEY, default=UPSTREAM_MEGABYTES) is not None:
        return
    weights, megabytes = sent_weights(config), UPSTREAM_MEGABYTES
    if weights is not None:
        megabytes = math.ceil(min(weights.total, UPSTREAM_MEGABYTES))
        if config.trainer.device == "cpu":
            megabytes = max(weights.needed_on_cpu(), min(megabytes, MOST_ON_CPU))
    OmegaConf.update(config, KEY, megabytes)


def check_weight_bucket(config: DictConfig) -> None:
    """Check that on CPUs each bucket holds the tensors that must arrive together."""
    if config.trainer.device != "cpu" or (weights := sent_weights(config)) is None:
        return
    megabytes, needed = OmegaConf.select(config, KEY), weights.needed_on_cpu()
    if megabytes < needed:
        reason = f"the tensor {weights.largest_name} must fit into a bucket"
        if weights.tied:
            reason = "its head is tied to the embeddings, both are sent, and vLLM wants them in the same bucket"
        raise ValueError(
            f"{KEY}={megabytes} is too small for {config.actor_rollout_ref.model.path}: {reason}; set at least "
            f"{needed}, or null, which chooses the size"
        )


def check_shared_memory(config: DictConfig, folder: str = "/dev/shm") -> None:
    """Check that this machine's shared memory has room for each worker's bucket on CPUs, and for NCCL on several GPUs.

    A process that writes beyond the room is killed by SIGBUS, without a message.
    """
    workers = config.trainer.n_gpus_per_node
    if config.trainer.device == "cpu":
        weights = sent_weights(config)
        megabytes = math.ceil(min(weights.total, OmegaConf.select(config, KEY)) * workers) if weights else 0
        use = f"the weights ({KEY})"
    else:
        megabytes, use = MEGABYTES_PER_GPU * workers * (workers > 1), f"{workers} GPUs (NCCL)"
    if Path(folder).exists() and (free := shutil.disk_usage(folder).free / 2**20) < megabytes:
        raise ValueError(
            f"{folder} has {free:.0f} MB free, and {use} need {megabytes} MB there: remove old files there, or make it "
            "larger, as by docker run --shm-size=1g"
        )


def sent_weights(config: DictConfig) -> SentWeights | None:
    """Return the sizes of the run's weights from the headers of its safetensors files; None if there are none here.

    The trainer sends a tied head, even if the files lack it, and all weights in its own type.
    """
    path = config.actor_rollout_ref.model.path
    folder = config_folder(path)
    dtype = OmegaConf.select(config, "actor_rollout_ref.actor.fsdp_config.model_dtype") or "fp32"
    elements: dict[str, int] = {}
    for file in folder.glob("*.safetensors") if folder else ():
        with safe_open(file, framework="pt") as tensors:
            elements |= {name: math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys()}
    if not elements:
        return None
    embeddings = max((size for name, size in elements.items() if name.endswith(EMBEDDINGS)), default=0)
    has_head = any(name.endswith(HEAD) for name in elements)
    # Configs of models that are always tied, such as Gemma's, may lack the key.
    tied = (model_json(path) or {}).get("tie_word_embeddings", not has_head)
    if tied and not has_head:
        elements[HEAD] = embeddings
    largest = max(elements, key=lambda name: elements[name])
    to_megabytes = PrecisionType.to_dtype(dtype).itemsize / 2**20
    return SentWeights(sum(elements.values()) * to_megabytes, elements[largest] * to_megabytes, largest, tied)
