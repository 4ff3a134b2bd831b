"""A trainer's own small state in each checkpoint, as a file beside upstream's folders."""

import json
from pathlib import Path

import torch

from verl.utils.atomic_files import replacing


def save_state(trainer, file_name: str, state: dict) -> None:
    """Write `state` to the checkpoint of the current step: as JSON, or as torch's format where the name ends in `.pt`.

    Call it before upstream's `_save_checkpoint`, which declares the checkpoint complete.
    """
    folder = Path(trainer.config.trainer.default_local_dir) / f"global_step_{trainer.global_steps}"
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / file_name) as unfinished:
        if file_name.endswith(".pt"):
            torch.save(state, unfinished)
        else:
            unfinished.write_text(json.dumps(state))


def load_state(trainer, file_name: str) -> dict | None:
    """The state of the checkpoint that upstream's `_load_checkpoint` has loaded; None: a fresh start, or no file."""
    if not trainer.global_steps:
        return None
    folder = Path(trainer.config.trainer.default_local_dir) / f"global_step_{trainer.global_steps}"
    if trainer.config.trainer.resume_mode == "resume_path":
        folder = Path(trainer.config.trainer.resume_from_path)
    path = folder / file_name
    if not path.exists():
        return None
    return torch.load(path, weights_only=True) if path.suffix == ".pt" else json.loads(path.read_text())
