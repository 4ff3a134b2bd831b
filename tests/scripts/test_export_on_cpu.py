"""`scripts/export.sh` writes a checkpoint with its card, or refuses and leaves nothing."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM

from recipe.common.tiny_model import write_tiny_model
from tests.recipe.common.explore import explore
from tests.scripts.loading import load_script
from verl.evaluation.scores.results import EvalResult, format_result_lines, write_result_log
from verl.trainer.checkpoint_marker import CONFIG_FILE, MARKER

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run's folder with complete checkpoints of steps 10 and 20, an incomplete one, metrics and an evaluation."""
    folder = tmp_path_factory.mktemp("outputs") / "run"
    for step in (10, 20, 30):
        checkpoint = folder / f"global_step_{step}"
        write_tiny_model(checkpoint / "actor/huggingface")
        if step < 30:
            (checkpoint / MARKER).touch()
    config = explore("hardware=cpu", "tree=latr", "credit=tree_gain", "loss=hapo", "trainer.experiment_name=run")
    OmegaConf.update(config, "actor_rollout_ref.model.path", "Qwen/Qwen2.5-0.5B")
    OmegaConf.update(config, "data.train_files", "/home/somebody/data/countdown/train.parquet")
    OmegaConf.update(config, "actor_rollout_ref.rollout.dtype", "bfloat16")
    OmegaConf.update(config, "reward.reward_kwargs.judge_api_key", "sk-hidden", force_add=True)
    OmegaConf.save(config, folder / "global_step_20" / CONFIG_FILE, resolve=True)
    row = {"step": 20, "data": {"critic/score/mean": 0.25, "val-core/countdown/acc/mean@8": 0.375}}
    (folder / "metrics.jsonl").write_text(f"{json.dumps(row)}\n")
    metrics = {"Acc-Pass@1": 0.5, "Acc-Pass@1-Low": 0.41, "Acc-Pass@1-High": 0.59}
    result = EvalResult(experiment="run", step=20, dataset="math500", n_samples=1, n_questions=500, metrics=metrics)
    log = folder.parent / "results/run/step_20/math500.log"
    log.parent.mkdir(parents=True)
    write_result_log(log, format_result_lines([result]))
    return folder


def export(*arguments) -> subprocess.CompletedProcess:
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "VIRTUAL_ENV": sys.prefix}
    command = ["bash", "scripts/export.sh", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)


def test_the_last_complete_checkpoint_with_its_card(run, tmp_path):
    done = export(run, tmp_path / "exported")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(tmp_path / "exported")
    assert str(AutoModelForCausalLM.from_pretrained(tmp_path / "exported").dtype) == "torch.bfloat16"
    card = ModelCard.load(tmp_path / "exported/README.md")
    assert (card.data.base_model, card.data.library_name) == ("Qwen/Qwen2.5-0.5B", "transformers")
    text = card.content
    assert "# run, step 20" in text and "weights are in bfloat16" in text
    for row in ("tree | latr", "credit | .*tree_gain", "loss | .*hapo", "training data | countdown/train.parquet"):
        assert re.search(rf"^\| {row} \|$", text, re.MULTILINE), row
    assert "0.500 (0.410 to 0.590)" in text and "0.375" in text
    config = OmegaConf.load(tmp_path / "exported/training_config.yaml")
    assert config.actor_rollout_ref.rollout.tree == "latr" and "ray_kwargs" not in config
    everything = "".join(path.read_text(errors="replace") for path in (tmp_path / "exported").iterdir())
    assert "sk-hidden" not in everything


def test_an_earlier_step_of_a_run_without_a_config(run, tmp_path):
    done = export(run, 10, tmp_path / "exported")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "exported/README.md").read_text()
    assert "# run, step 10" in text and "holds no config.yaml" in text and "The run's folder has none." in text
    assert not (tmp_path / "exported/training_config.yaml").exists()


@pytest.fixture(scope="module")
def script():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path])  # The script puts its folder there.
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
