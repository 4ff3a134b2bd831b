"""Finds a run's checkpoint and turns it into a folder that a server can load."""

import hashlib
from pathlib import Path
from typing import NamedTuple

from verl.evaluation.model.shards import has_lora
from verl.trainer.checkpoint_marker import MERGED, complete_steps
from verl.utils.atomic_files import new_folder

END_BYTES = 1 << 20


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
    try:
        step = checkpoint_step(run_dir, step)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
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
    """Return a hash of the names, sizes, first and last MiB of the files of weights; None for a name on the hub.

    For a run's checkpoint the shards are hashed, so that merging them does not change the hash.
    """
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


def merge_shards(shards: Path, merged: Path) -> None:
    """Write the model of a checkpoint's shards to the folder `merged`, which appears only when it is complete."""
    from verl.evaluation.model.folder import write_model_folder

    try:
        with new_folder(merged) as unfinished:
            write_model_folder(shards, unfinished)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
