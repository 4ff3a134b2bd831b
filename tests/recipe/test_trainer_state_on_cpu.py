"""What HAPO's and LATR's trainers keep between steps comes back with the checkpoint; upstream's part is a stand-in."""

import pytest
from omegaconf import OmegaConf
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from recipe.hapo.hapo_trainer import HAPOTrainer
from recipe.latr.latr_trainer import LATRTrainer
from verl.trainer.ppo.hapo_algos import EntropyStatistics


@pytest.fixture
def trainer_of(tmp_path, monkeypatch):
    """A trainer of the class at the step of the latest checkpoint, as upstream's `_load_checkpoint` leaves it."""
    monkeypatch.setattr(PPOTrainerSync, "_save_checkpoint", lambda self: None)

    def make(cls, step: int, **resume):
        monkeypatch.setattr(PPOTrainerSync, "_load_checkpoint", lambda self: setattr(self, "global_steps", step))
        trainer = cls.__new__(cls)
        trainer.config = OmegaConf.create({"trainer": {"default_local_dir": str(tmp_path), "resume_mode": "auto"}})
        trainer.config.trainer.update(resume)
        trainer.global_steps, trainer.statistics, trainer.notches = step, None, 0
        return trainer

    return make


def test_hapos_statistics(trainer_of, tmp_path):
    saved = trainer_of(HAPOTrainer, 7)
    saved.statistics = EntropyStatistics(-3.1, 2.25, 0.5, 0.2)
    saved._save_checkpoint()
    for resume in ({}, {"resume_mode": "resume_path", "resume_from_path": str(tmp_path / "global_step_7")}):
        loaded = trainer_of(HAPOTrainer, 7, **resume)
        loaded._load_checkpoint()
        assert loaded.statistics == saved.statistics


def test_latrs_notches(trainer_of):
    saved = trainer_of(LATRTrainer, 3)
    saved.notches = -4
    saved._save_checkpoint()
    loaded = trainer_of(LATRTrainer, 3)
    loaded._load_checkpoint()
    assert loaded.notches == -4


@pytest.mark.parametrize("step", [0, 5])
def test_a_fresh_start_and_a_checkpoint_of_another_trainer_have_none(trainer_of, step):
    loaded = trainer_of(HAPOTrainer, step)
    loaded._load_checkpoint()
    assert loaded.statistics is None
