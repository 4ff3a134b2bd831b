"""Finds a run's checkpoint, and writes its model as a Hugging Face folder for vLLM and transformers.

The weights come from the FSDP workers' shards, with LoRA merged. Upstream's `verl.model_merger` is not used, because it
rounds every weight to bfloat16 and leaves LoRA out of the model.
"""

import hashlib
import json
import math
import shutil
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from omegaconf import DictConfig, OmegaConf
from torch.distributed.tensor import DTensor

from verl.trainer.checkpoint_marker import CONFIG_FILE, MERGED, complete_steps, saved_config
from verl.utils.atomic_files import new_folder

END_BYTES = 1 << 20
HUGGINGFACE = "huggingface"  # the trainer's folder of config and tokenizer beside the shards
LARGEST_FILE = "5GB"
FSDP_FILE = "fsdp_config.json"
LORA_FILE = "lora_train_meta.json"  # upstream writes it beside the shards of a run with LoRA
PEFT_PREFIX = "base_model.model."
MODEL = "actor_rollout_ref.model"
LORA_A, LORA_B = ".lora_A.default.weight", ".lora_B.default.weight"

Weights = Iterable[tuple[str, torch.Tensor]]


class Checkpoint(NamedTuple):
    """The model to evaluate. `shards`, if not None, must be merged into the folder `model` before a server loads it."""

    model: str
    step: int | None
    shards: Path | None = None


def find_checkpoint(experiment: str, step: int | None) -> Checkpoint:
    """Return the checkpoint of `step`, by default the last complete one, of the run in `outputs/<experiment>`.

    This changes no file. `shards` is None if the checkpoint already has a whole model, saved by the trainer or merged
    earlier. A model that a run with LoRA saved is not whole, as it lacks LoRA's part.
    """
    run_dir = Path("outputs") / experiment
    step = checkpoint_step(run_dir, step)
    folder = run_dir / f"global_step_{step}"
    shards, saved, merged = folder / "actor", folder / "actor" / "huggingface", folder / MERGED
    if list(saved.glob("*.safetensors")) and not has_lora(shards):
        return Checkpoint(str(saved), step)
    return Checkpoint(str(merged), step, None if merged.exists() else shards)


def checkpoint_step(run_dir: Path, step: int | None) -> int:
    """Return `step`, or the run's last complete step if it is None."""
    if not run_dir.is_dir():
        raise ValueError(f"{run_dir} does not exist: expected a run's folder")
    steps = complete_steps(run_dir)
    if not steps or (step is not None and step not in steps):
        clause = "" if step is None else f" of step {step}"
        raise ValueError(f"{run_dir} has no complete checkpoint{clause}; it has {steps}")
    return steps[-1] if step is None else step


def fingerprint(checkpoint: Checkpoint) -> str | None:
    """Return a hash of the names, sizes, first and last MiB of the files of weights; None for a name on the hub. For a
    run's checkpoint the shards are hashed, so that merging them does not change the hash."""
    folder = Path(checkpoint.model)
    if checkpoint.step is not None:
        folder = next(parent for parent in folder.parents if parent.name.startswith("global_step_")) / "actor"
    files = sorted(path for path in folder.rglob("*") if path.suffix in (".safetensors", ".bin", ".pt"))
    if not files:
        return None
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.relative_to(folder)} {size} ".encode())
        with path.open("rb") as file:
            digest.update(file.read(END_BYTES))
            file.seek(max(0, size - END_BYTES))
            digest.update(file.read())
    return digest.hexdigest()[:16]


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
    return name.removeprefix(PEFT_PREFIX).replace(".base_layer.", ".")


def _read_shards(actor: Path) -> list[Mapping[str, torch.Tensor]]:
    """Return each rank's shards by the weights' names. The files are mapped into memory and read when needed."""
    workers = json.loads((actor / FSDP_FILE).read_text())["world_size"]
    files = [actor / f"model_world_size_{workers}_rank_{rank}.pt" for rank in range(workers)]
    if bad := [file.name for file in files if not zipfile.is_zipfile(file)]:
        raise ValueError(f"{actor}: missing or damaged: {', '.join(bad[:4])}{' …' * (len(bad) > 4)}; copy them again")
    return [torch.load(file, map_location="cpu", weights_only=False, mmap=True) for file in files]


def _whole(name: str, shards: list[Mapping[str, torch.Tensor]]) -> torch.Tensor:
    """Return a weight from the shards of all ranks. Ranks that hold copies (HSDP) are read once. A weight that is no
    DTensor is whole on each rank."""
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


def write_model_folder(actor: Path, target: Path) -> None:
    """Write the model of a checkpoint, with its tokenizer, to a new folder, which appears only when it is complete.

    The weights get the data type in which the run's rollout served them. If the checkpoint does not say it, they keep
    the trainer's data type. LoRA is merged.
    """
    source, config = actor / HUGGINGFACE, saved_config(actor.parent)
    model_class = _model_class(source)
    served = None if config is None else OmegaConf.select(config, "actor_rollout_ref.rollout.dtype")
    dtype = getattr(torch, str(served), None)  # None: the run's config leaves it to vLLM
    if list(actor.glob("model_world_size_*.pt")):
        model = _load(model_class, source, read_weights(actor, dtype, partial(_base_weights, model_class, config)))
    else:
        model = model_class.from_pretrained(source, dtype=dtype or "auto")
    with new_folder(target) as folder:
        model.save_pretrained(folder, max_shard_size=LARGEST_FILE)
        for file in source.iterdir():
            if file.is_file() and file.name != "config.json" and ".safetensors" not in file.name:
                shutil.copy(file, folder)
        for file in folder.glob("*.safetensors"):  # The library lets the owner alone read them.
            shutil.copymode(folder / "config.json", file)


def _model_class(source: Path) -> Any:
    import transformers

    name = transformers.AutoConfig.from_pretrained(source).architectures[0]
    if not hasattr(transformers, name):
        raise ValueError(f"{source}/config.json: transformers {transformers.__version__} has no architecture {name}")
    return getattr(transformers, name)


def _base_weights(model_class: Any, config: DictConfig | None) -> Weights:
    if config is None:
        raise ValueError("the checkpoint holds LoRA's factors only, and no config.yaml that names the base model")
    return model_class.from_pretrained(config.actor_rollout_ref.model.path, dtype="auto").state_dict().items()


def _load(model_class: Any, source: Path, weights: Weights) -> Any:
    """Return the model whose config lies in `source`, with these weights."""
    with torch.device("meta"):
        model = model_class(model_class.config_class.from_pretrained(source))
    try:
        unknown = model.load_state_dict(dict(weights), strict=False, assign=True).unexpected_keys
    except RuntimeError as error:
        raise ValueError(f"{source}/config.json does not fit the shards: {error}") from error
    model.tie_weights()  # A head that is tied to the embeddings may have no weight of its own.
    missing = [name for name, tensor in model.state_dict().items() if tensor.is_meta]
    if unknown or missing:
        raise ValueError(f"{source}/config.json does not fit the shards, which lack {missing} and have {unknown}")
    return model
