"""Finds a run's checkpoint and turns it into a folder that a server can load."""

import hashlib
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from verl.trainer.checkpoint_marker import MERGED, complete_steps
from verl.utils.atomic_files import new_folder

END_BYTES = 1 << 20


class Checkpoint(NamedTuple):
    """The model to evaluate. `shards`, if not None, must be merged into the folder `model` before a server loads it."""

    model: str
    step: int | None
    shards: Path | None = None


def find_checkpoint(experiment: str, step: int | None) -> Checkpoint:
    """Return a run's checkpoint of `step`, by default the last complete one, without changing any file.

    Raises:
        SystemExit: the run has no such complete checkpoint.
    """
    run_dir = Path("outputs") / experiment
    steps = complete_steps(run_dir)
    if not steps or (step is not None and step not in steps):
        clause = "" if step is None else f" of step {step}"
        raise SystemExit(f"error: {run_dir} has no complete checkpoint{clause}; it has {steps}")
    step = steps[-1] if step is None else step
    folder = run_dir / f"global_step_{step}"
    shards, saved, merged = folder / "actor", folder / "actor" / "huggingface", folder / MERGED
    if list(saved.glob("*.safetensors")):
        return Checkpoint(str(saved), step)
    return Checkpoint(str(merged), step, None if merged.exists() else shards)


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
    """Merge the trainer's shards into a Hugging Face folder, which appears only when it is complete.

    Raises:
        SystemExit: verl's merger failed; the message holds the end of its output.
    """
    with new_folder(merged) as unfinished:
        merge = [sys.executable, "-m", "verl.model_merger", "merge", "--backend", "fsdp"]
        merge += ["--local_dir", str(shards), "--target_dir", str(unfinished)]
        done = subprocess.run(merge, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"error: merging {shards} failed:\n{done.stderr[-2000:]}")
