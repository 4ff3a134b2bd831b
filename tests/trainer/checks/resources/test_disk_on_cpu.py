"""The checkpoints to come must fit on the disk, up to the number that are kept."""

import shutil
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from tests.configs import composed
from tests.trainer.checks.model.models import model
from verl.trainer.checks.resources.disk import check_disk, disk_plan


@pytest.fixture
def config(tmp_path):
    config = composed("grpo_trainer", f"trainer.default_local_dir={tmp_path}/run/new")
    OmegaConf.set_struct(config, False)
    model("Qwen2.5-7B").save_pretrained(tmp_path / "model")
    config.actor_rollout_ref.model.path = str(tmp_path / "model")
    saving = {"save_freq": 50, "total_training_steps": 200, "max_actor_ckpt_to_keep": 2}
    return OmegaConf.merge(config, {"trainer": saving})


def test_a_checkpoint_has_the_weights_and_adams_two_states(config):
    size, number, free = disk_plan(config)
    assert size == pytest.approx(7.62e9 * (4 + 4 + 4), rel=0.01) and number == 2 and free > 0
    config.actor_rollout_ref.model.lora_rank = 8
    size, _, _ = disk_plan(config)
    assert 7.62e9 * 4 < size < 7.62e9 * 4 * 1.1


@pytest.mark.parametrize(
    ("changes", "number"),
    [
        ({"max_actor_ckpt_to_keep": None}, 4),
        ({"total_training_steps": 60}, 2),
        ({"total_training_steps": 30}, 1),
        ({"total_training_steps": None}, 1),
        ({"save_freq": -1}, 0),
    ],
)
def test_the_number_of_checkpoints_to_come(config, changes, number):
    assert disk_plan(OmegaConf.merge(config, {"trainer": changes}))[1] == number


def test_a_folder_into_which_nothing_can_be_written_is_named(config):
    config.trainer.validation_data_dir = f"{config.actor_rollout_ref.model.path}/config.json/validation"
    with pytest.raises(ValueError, match="trainer.validation_data_dir=.*: nothing can be written into .*config.json"):
        check_disk(config)


def test_a_disk_without_room_is_refused(config, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=200e9))
    check_disk(config)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=180e9))
    with pytest.raises(ValueError, match=r"180.0 GB are free there, and the run will write 2 checkpoint.* of 91.4 GB"):
        check_disk(config)
    config.trainer.save_freq = -1
    check_disk(config)
