"""Saves and loads small states of a trainer as files in a checkpoint, beside upstream's folders."""

import json
import pickle
from pathlib import Path

import torch

from verl.utils.atomic_files import replacing


def save_state(trainer, file_name: str, state: dict) -> None:
    """Write `state` to the checkpoint of the current step: in torch's format (`.pt`), pickled (`.pkl`) or as JSON. Call
    it before upstream's `_save_checkpoint`, which declares the checkpoint complete."""
    with replacing(_folder(trainer) / file_name) as unfinished:
        if file_name.endswith(".pt"):
            torch.save(state, unfinished)
        elif file_name.endswith(".pkl"):
            unfinished.write_bytes(pickle.dumps(state))
        else:
            unfinished.write_text(json.dumps(state))


def load_state(trainer, file_name: str) -> dict | None:
    """Return the state in the checkpoint that upstream has loaded; None for a fresh start or a missing file."""
    path = loaded_folder(trainer) / file_name
    if not trainer.global_steps or not path.exists():
        return None
    if path.suffix == ".pkl":
        return pickle.loads(path.read_bytes())
    return torch.load(path, weights_only=True) if path.suffix == ".pt" else json.loads(path.read_text())


def loaded_folder(trainer) -> Path:
    """Return the folder of the checkpoint from which the run has resumed."""
    config = trainer.config.trainer
    return Path(config.resume_from_path) if config.resume_mode == "resume_path" else _folder(trainer)


def _folder(trainer) -> Path:
    return Path(trainer.config.trainer.default_local_dir) / f"global_step_{trainer.global_steps}"
