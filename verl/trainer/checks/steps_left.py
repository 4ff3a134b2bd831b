"""Settles how many steps a run trains, and checks that a checkpoint leaves some."""

from omegaconf import DictConfig

from verl.utils.fault_reports import RunError


def settle_epochs(config: DictConfig) -> None:
    """Let `trainer.total_training_steps`, where it is set, be the only bound: raise `trainer.total_epochs` to allow it.

    Upstream (verl 0.9.1) ends after `total_epochs` all the same, without its last checkpoint and validation. An epoch
    has at least one step.
    """
    if steps := config.trainer.get("total_training_steps"):
        config.trainer.total_epochs = max(config.trainer.total_epochs, steps)


def check_steps_left(step: int, total_steps: int, run_dir: str) -> None:
    """Say that a run is complete whose last checkpoint is of its last step.

    Raises:
        RunError: the checkpoint is of a later step, so that the run would train nothing.
    """
    if step < total_steps:
        return
    message = f"the checkpoint in {run_dir} is of step {step}, and the run has {total_steps} steps"
    advice = (
        "raise trainer.total_training_steps (or trainer.total_epochs), or begin another run with another "
        "trainer.experiment_name (in scripts EXPERIMENT_NAME)"
    )
    if step > total_steps:
        raise RunError(f"{message}: nothing is left to train; {advice}")
    print(f"{message}: it is complete. To train on, {advice}", flush=True)
