"""Tests of how numbers of steps and workers are settled, and of runs that would train no step."""

import pytest
from omegaconf import OmegaConf

from tests.tables import table
from verl.trainer.checks.run_dir import check_resumed_step, check_steps_left
from verl.trainer.checks.settle import scale_workers, settle_epochs
from verl.utils.fault_reports import RunError


@pytest.mark.parametrize("steps, epochs, expected", [(100, 1, 100), (3, 15, 15), (None, 2, 2)])
def test_steps_are_not_cut_off_by_epochs(steps, epochs, expected):
    """An epoch may be of a single step, so that no fewer epochs hold all steps for sure."""
    config = OmegaConf.create({"trainer": {"total_training_steps": steps, "total_epochs": epochs}})
    settle_epochs(config)
    assert config.trainer.total_epochs == expected and config.trainer.total_training_steps == steps


def test_a_run_that_ends_before_its_checkpoint_is_refused(capsys):
    check_steps_left(4, 5, "runs/a")
    assert capsys.readouterr().out == ""
    check_steps_left(5, 5, "runs/a")
    assert "the checkpoint in runs/a is of step 5, and the run has 5 steps: it is complete" in capsys.readouterr().out
    with pytest.raises(RunError, match="runs/a is of step 6, and the run has 5 steps: nothing is left to train; raise"):
        check_steps_left(6, 5, "runs/a")


def test_a_resumed_step_beyond_the_last_is_refused_before_anything_starts(tmp_path):
    trainer = {"default_local_dir": str(tmp_path), "total_training_steps": 5, "resume_mode": "auto"}
    config = OmegaConf.create({"trainer": trainer})
    for step in (5, 6):
        check_resumed_step(config)
        (tmp_path / f"global_step_{step}/actor").mkdir(parents=True)
        (tmp_path / f"global_step_{step}/COMPLETE").touch()
    with pytest.raises(RunError, match="is of step 6, and the run has 5 steps"):
        check_resumed_step(config)
    for change in ({"resume_mode": "disable"}, {"val_only": True}, {"total_training_steps": None}):
        check_resumed_step(OmegaConf.create({"trainer": trainer | change}))


@pytest.mark.parametrize(("nodes", "rollout_nodes", "given", "expected"), table(__file__, "numbers of workers"))
def test_null_numbers_of_workers_become_eight_a_node(nodes, rollout_nodes, given, expected):
    rollout = {"nnodes": rollout_nodes, "agent": {"num_workers": given[0]}}
    sections = {"trainer": {"nnodes": nodes}, "reward": {"num_workers": given[1]}}
    config = OmegaConf.create(sections | {"actor_rollout_ref": {"rollout": rollout}})
    scale_workers(config)
    assert (config.actor_rollout_ref.rollout.agent.num_workers, config.reward.num_workers) == expected
