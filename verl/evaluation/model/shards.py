"""Reads the weights of a checkpoint from the FSDP workers' shards, and merges the factors of LoRA into them.

Upstream's `verl.model_merger` is not used, because it rounds every weight to bfloat16 and leaves LoRA out of the model.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch.distributed.tensor import DTensor

from verl.trainer.checkpoint_marker import CONFIG_FILE, damaged_files, saved_config

FSDP_FILE = "fsdp_config.json"
LORA_FILE = "lora_train_meta.json"  # upstream writes it beside the shards of a run with LoRA
PEFT_PREFIX = "base_model.model."
MODEL = "actor_rollout_ref.model"
LORA_A, LORA_B = ".lora_A.default.weight", ".lora_B.default.weight"

Weights = Iterable[tuple[str, torch.Tensor]]


def has_lora(actor: Path) -> bool:
    """Return whether the shards in a checkpoint's folder `actor` are those of a run with LoRA."""
    return (actor / LORA_FILE).exists()


def read_weights(actor: Path, dtype: torch.dtype | None, base: Callable[[], Weights]) -> Iterator[tuple[str, Any]]:
    """Yield the names and weights of a checkpoint's model, one whole weight at a time.

    LoRA is merged in float32: W + alpha / r * B A, rounded once; rsLoRA divides by the root of r.

    Args:
        dtype: data type of the weights; None keeps the one that they have in the shards.
        base: function that returns the base model's weights, for a checkpoint that holds the factors of LoRA only.
    """
    shards = _read_shards(actor)
    adapted = {_plain(name.removesuffix(LORA_A)) + ".weight" for name in shards[0] if name.endswith(LORA_A)}
    factors = {_plain(name): name for name in shards[0] if "lora_" in name}
    lora = lora_settings(actor) if factors else {}
    scale = lora["lora_alpha"] / (math.sqrt(lora["r"]) if lora["use_rslora"] else lora["r"]) if lora else 0.0
    frozen = ((_plain(name), _whole(name, shards)) for name in shards[0] if "lora_" not in name)
    for name, weight in base() if len(factors) == len(shards[0]) else frozen:
        target = dtype if dtype and weight.is_floating_point() else weight.dtype
        if name in adapted:
            module = name.removesuffix(".weight")
            a, b = (_whole(factors.pop(module + suffix), shards).float() for suffix in (LORA_A, LORA_B))
            weight = weight.float() + scale * (b @ a)
        yield name, weight.to(target)
    if factors:
        raise ValueError(
            f"{actor}: LoRA of {', '.join(sorted(factors)[:3])} is not known here, only that of linear layers"
        )


def read_factors(actor: Path) -> dict[str, torch.Tensor]:
    """Return the factors of a checkpoint's LoRA, whole and in the trainer's data type, by the names in PEFT's model."""
    shards = _read_shards(actor)
    return {name: _whole(name, shards) for name in shards[0] if "lora_" in name}


def lora_settings(actor: Path) -> dict[str, Any]:
    """Return `r`, `lora_alpha` and `use_rslora` of a checkpoint's LoRA."""
    if not has_lora(actor):
        raise ValueError(f"{actor} lacks {LORA_FILE}, which holds the rank and alpha of LoRA: did the run have none?")
    config = saved_config(actor.parent) or OmegaConf.create()
    start, rslora = (OmegaConf.select(config, f"{MODEL}.{key}") for key in ("lora_adapter_path", "lora.use_rslora"))
    if start and rslora is None:  # A checkpoint of an earlier version.
        raise ValueError(
            f"{actor.parent / CONFIG_FILE} does not say whether the adapter {start}, from which the run started, has "
            f"use_rslora: add {MODEL}.lora.use_rslora with the value in its adapter_config.json"
        )
    lora = json.loads((actor / LORA_FILE).read_text())
    return {"r": lora["r"], "lora_alpha": lora["lora_alpha"], "use_rslora": bool(rslora)}


def _plain(name: str) -> str:
    """Return a weight's name in the model without LoRA."""
    return name.removeprefix(PEFT_PREFIX).replace(".base_layer.", ".")


def _read_shards(actor: Path) -> list[Mapping[str, torch.Tensor]]:
    """Return each rank's shards by the weights' names. The files are mapped into memory and read when needed."""
    workers = json.loads((actor / FSDP_FILE).read_text())["world_size"]
    files = [actor / f"model_world_size_{workers}_rank_{rank}.pt" for rank in range(workers)]
    damaged = set(damaged_files(actor))
    if bad := [file.name for file in files if not file.exists() or file in damaged]:
        raise ValueError(f"{actor}: missing or damaged: {', '.join(bad[:4])}{' …' * (len(bad) > 4)}; copy them again")
    return [torch.load(file, map_location="cpu", weights_only=False, mmap=True) for file in files]


def _whole(name: str, shards: list[Mapping[str, torch.Tensor]]) -> torch.Tensor:
    """Return a weight from the shards of all ranks. Ranks that hold copies (HSDP) are read once.

    A weight that is no DTensor is whole on each rank.
    """
    first = shards[0][name]
    if not isinstance(first, DTensor):
        return first
    ranks, dims = first.device_mesh.mesh, []
    for i, placement in reversed(list(enumerate(first.placements))):
        if placement.is_shard():
            dims.append(placement.dim)
        else:
            ranks = ranks.select(i, 0)
    if ranks.dim() > 1 or any(placement.is_partial() for placement in first.placements):
        raise ValueError(
            f"{name} has placements {first.placements}: expected shards along at most one dimension of the mesh"
        )
    parts = [shards[rank][name].to_local() for rank in ranks.flatten().tolist()]
    return torch.cat(parts, dims[0]) if dims else parts[0]
