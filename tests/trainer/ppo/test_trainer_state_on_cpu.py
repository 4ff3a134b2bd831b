"""A checkpoint's real files restore the components' state between steps; upstream's part is a stand-in."""

import pytest
import torch
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from recipe.hapo.normalized_entropy import EntropyStatistics
from recipe.hato.value_model import FEATURES
from tests.trainer.ppo.toy_step import ACTOR, ROLLOUT, trainer_of
from verl.trainer.checkpoint_marker import complete_steps
from verl.trainer.ppo.v1.explore_trainer import ExploreTrainer
from verl.trainer.ppo.v1.watched_run import WatchedSyncTrainer

HAPO = {f"{ACTOR}.policy_loss.loss_mode": "hapo", f"{ACTOR}.adaptive_clip": True}
LATR = {
    f"{ROLLOUT}._target_": "verl.workers.config.explore.ExploreRolloutConfig",
    f"{ROLLOUT}.tree": "latr",
    f"{ROLLOUT}.kt": {"enable_param_scheduler": True},
}
HATO = {f"{ROLLOUT}.tree": "hato", "algorithm.adv_estimator": "tree_gain", "hato": {"meta_learning": {}}}
PROBE = [[0.3] * len(FEATURES)]


@pytest.fixture
def trainer_at(tmp_path, monkeypatch):
    """A trainer at the step of the latest checkpoint, as upstream's `_load_checkpoint` leaves it."""
    monkeypatch.setattr(PPOTrainerSync, "_save_checkpoint", lambda self: None)

    def make(values: dict, step: int, **resume):
        monkeypatch.setattr(PPOTrainerSync, "_load_checkpoint", lambda self: setattr(self, "global_steps", step))
        folder = {"trainer.default_local_dir": str(tmp_path)} | {f"trainer.{k}": v for k, v in resume.items()}
        trainer = trainer_of(values | folder)
        trainer.global_steps = step
        return trainer

    return make


def of_kind(trainer, name: str):
    return next(component for component in trainer.components if type(component).__name__ == name)


STATISTICS = EntropyStatistics(-3.1, 2.25, 0.5, 0.2)


@pytest.mark.parametrize("by_path", [False, True])
@pytest.mark.parametrize(
    ("values", "kind", "name", "state"),
    [(HAPO, "NormalizedEntropy", "statistics", STATISTICS), (LATR, "ThresholdScheduler", "tightened_steps", -4)],
)
def test_hapos_statistics_and_latrs_thresholds(trainer_at, tmp_path, values, kind, name, state, by_path):
    saved = trainer_at(values, 7)
    setattr(of_kind(saved, kind), name, state)
    saved._save_checkpoint()
    resume = {"resume_mode": "resume_path", "resume_from_path": str(tmp_path / "global_step_7")} if by_path else {}
    loaded = trainer_at(values, 7, **resume)
    loaded._load_checkpoint()
    assert getattr(of_kind(loaded, kind), name) == state


@pytest.mark.parametrize("kind", [ExploreTrainer, WatchedSyncTrainer])
def test_a_checkpoint_that_is_overwritten_is_not_complete_meanwhile(trainer_at, tmp_path, kind):
    """Marks of an abandoned run (resume_mode=disable or resume_path) stay until the first checkpoint of the new run."""
    for step in (10, 20, 30):
        (tmp_path / f"global_step_{step}/actor").mkdir(parents=True)
        (tmp_path / f"global_step_{step}/COMPLETE").touch()
    assert complete_steps(tmp_path) == [10, 20, 30]
    saved = kind(trainer_at(HAPO, 20, resume_mode="disable").config)
    saved.global_steps = 20
    saved._save_checkpoint()
    assert complete_steps(tmp_path) == [10]


def test_hatos_value_model_problems_and_paths(trainer_at, tmp_path):
    """The resumed run goes on as the first would have: the value model learns the same from the same steps."""
    saved, loaded = trainer_at(HATO, 7), trainer_at(HATO, 7)
    search = of_kind(saved, "HATOSearch")
    search.value_model.observe([[step / 9] * len(FEATURES) for step in range(9)], [0.0, 1.0, 0.5] * 3)
    search.record = {"a problem": (12, 0.25), "another": (3, 1.0)}
    of_kind(saved, "SuccessfulPaths").references.keep("a problem", [[1, 2, 3], [1, 4]])
    saved._save_checkpoint()
    files = sorted(path.name for path in (tmp_path / "global_step_7").iterdir())
    assert files == ["hato.pt", "hato_paths.pt", "meta_learning.json"]
    loaded._load_checkpoint()
    resumed = of_kind(loaded, "HATOSearch")
    assert resumed.record == search.record
    for model in (search.value_model, resumed.value_model):
        model.observe(PROBE, [1.0])
    assert torch.equal(search.value_model.predict(PROBE)[0], resumed.value_model.predict(PROBE)[0])
    assert of_kind(loaded, "SuccessfulPaths").references.of("a problem") == [[1, 2, 3], [1, 4]]


def test_a_value_model_of_another_shape_is_refused(trainer_at):
    trainer_at(HATO, 7)._save_checkpoint()
    other = trainer_at(HATO | {"hato": {"uncertainty": {"method": "dropout"}}}, 7)
    with pytest.raises(ValueError, match="hato.uncertainty.method was ensemble in the checkpoint and is dropout"):
        other._load_checkpoint()


def meta(enable: bool, n_inner_steps: int = 4) -> dict:
    return HATO | {"hato": {"meta_learning": {"enable": enable, "n_inner_steps": n_inner_steps}}}


@pytest.mark.parametrize(("before", "after"), [(False, True), (True, False), (True, True)])
def test_no_run_resumes_within_an_episode_of_meta_learning(trainer_at, before, after):
    saved = trainer_at(meta(before), 7)
    of_kind(saved, "MetaLearning").steps_done = 7
    saved._save_checkpoint()
    with pytest.raises(ValueError, match="hato.meta_learning was .* step 7 lies within an episode"):
        trainer_at(meta(after), 7)._load_checkpoint()


def test_another_meta_learning_may_begin_where_no_episode_is_open(trainer_at):
    saved = trainer_at(meta(True, n_inner_steps=4), 8)
    of_kind(saved, "MetaLearning").steps_done = 8
    saved._save_checkpoint()
    trainer_at(meta(True, n_inner_steps=2), 8)._load_checkpoint()
    trainer_at(meta(False), 8)._load_checkpoint()


@pytest.mark.parametrize("step", [0, 5])
def test_a_fresh_start_and_a_checkpoint_of_another_method_have_none(trainer_at, step):
    loaded = trainer_at(HAPO, step)
    loaded._load_checkpoint()
    assert of_kind(loaded, "NormalizedEntropy").statistics is None


def test_nothing_is_saved_before_the_first_statistics(trainer_at, tmp_path):
    trainer_at(HAPO, 1)._save_checkpoint()
    assert not list(tmp_path.rglob("hapo.json"))
