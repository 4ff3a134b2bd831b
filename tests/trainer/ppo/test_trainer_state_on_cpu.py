"""What components keep between steps comes back with the checkpoint; upstream's part is a stand-in."""

import pytest
from omegaconf import OmegaConf
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from verl.trainer.ppo.hapo_algos import EntropyStatistics
from verl.trainer.ppo.v1.components import NormalisedEntropy, ThresholdScheduler
from verl.trainer.ppo.v1.explore_trainer import ExploreTrainer


@pytest.fixture
def trainer_of(tmp_path, monkeypatch):
    """A trainer with the component at the step of the latest checkpoint, as upstream's `_load_checkpoint` leaves it."""
    monkeypatch.setattr(PPOTrainerSync, "_save_checkpoint", lambda self: None)

    def make(component, step: int, **resume):
        monkeypatch.setattr(PPOTrainerSync, "_load_checkpoint", lambda self: setattr(self, "global_steps", step))
        trainer = ExploreTrainer.__new__(ExploreTrainer)
        trainer.config = OmegaConf.create({"trainer": {"default_local_dir": str(tmp_path), "resume_mode": "auto"}})
        trainer.config.trainer.update(resume)
        made = component.__new__(component)
        made.statistics, made.notches = None, 0
        trainer.global_steps, trainer.components = step, [made]
        return trainer, made

    return make


def test_hapos_statistics(trainer_of, tmp_path):
    saved, component = trainer_of(NormalisedEntropy, 7)
    component.statistics = EntropyStatistics(-3.1, 2.25, 0.5, 0.2)
    saved._save_checkpoint()
    for resume in ({}, {"resume_mode": "resume_path", "resume_from_path": str(tmp_path / "global_step_7")}):
        loaded, again = trainer_of(NormalisedEntropy, 7, **resume)
        loaded._load_checkpoint()
        assert again.statistics == component.statistics


def test_latrs_notches(trainer_of):
    saved, component = trainer_of(ThresholdScheduler, 3)
    component.notches = -4
    saved._save_checkpoint()
    loaded, again = trainer_of(ThresholdScheduler, 3)
    loaded._load_checkpoint()
    assert again.notches == -4


@pytest.mark.parametrize("step", [0, 5])
def test_a_fresh_start_and_a_checkpoint_of_another_method_have_none(trainer_of, step):
    loaded, component = trainer_of(NormalisedEntropy, step)
    loaded._load_checkpoint()
    assert component.statistics is None


def test_nothing_is_saved_before_the_first_statistics(trainer_of, tmp_path):
    trainer_of(NormalisedEntropy, 1)[0]._save_checkpoint()
    assert not list(tmp_path.rglob("hapo.json"))
