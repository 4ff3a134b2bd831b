"""`scripts/export.sh` writes a checkpoint, or refuses and leaves nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM

from recipe.common.tiny_model import write_tiny_model
from tests.recipe.common.explore import explore
from tests.scripts.loading import load_script
from verl.trainer.checkpoint_marker import CONFIG_FILE, MARKER

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run's folder with complete checkpoints of steps 10 and 20, and an incomplete one."""
    folder = tmp_path_factory.mktemp("outputs") / "run"
    for step in (10, 20, 30):
        checkpoint = folder / f"global_step_{step}"
        write_tiny_model(checkpoint / "actor/huggingface")
        if step < 30:
            (checkpoint / MARKER).touch()
    config = explore("hardware=cpu", "tree=latr", "credit=tree_gain", "loss=hapo")
    OmegaConf.update(config, "actor_rollout_ref.model.path", "Qwen/Qwen2.5-0.5B")
    OmegaConf.update(config, "actor_rollout_ref.rollout.dtype", "bfloat16")
    OmegaConf.save(config, folder / "global_step_20" / CONFIG_FILE, resolve=True)
    return folder


def export(*arguments) -> subprocess.CompletedProcess:
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "VIRTUAL_ENV": sys.prefix}
    command = ["bash", "scripts/export.sh", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)


def dtype_of(folder: Path) -> torch.dtype:
    return AutoModelForCausalLM.from_pretrained(folder).dtype


def test_the_last_complete_checkpoint_or_an_earlier_one(run, tmp_path):
    """The last one has a config, which names bfloat16; without it, weights keep the data type of the shards."""
    done = export(run, tmp_path / "exported")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(tmp_path / "exported")
    assert dtype_of(tmp_path / "exported") == torch.bfloat16
    done = export(run, 10, tmp_path / "earlier")
    assert done.returncode == 0, done.stderr
    assert dtype_of(tmp_path / "earlier") == torch.float32


@pytest.fixture(scope="module")
def script():
    return load_script("export")


def test_an_export_without_a_checkpoint_or_a_new_folder_is_refused(script, run, tmp_path):
    (tmp_path / "there").mkdir()
    for arguments, message in (
        ((run, 30, tmp_path / "new"), r"error: .*/run has no complete checkpoint of step 30; it has \[10, 20\]"),
        ((run, tmp_path / "there"), r"error: .*/there exists: choose another folder, or remove it"),
        (("no_such_run", tmp_path / "new"), r"error: .*outputs/no_such_run does not exist: expected a run's folder"),
    ):
        with pytest.raises(SystemExit, match=message):
            script.main([*map(str, arguments)])
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
