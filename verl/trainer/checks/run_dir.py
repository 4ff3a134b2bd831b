"""Checks the checkpoint from which a run would resume, and prepares the run's folder."""

import json
import os
import re
import sys
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from verl.trainer.checkpoint_marker import complete_steps, repair_tracker
from verl.trainer.checks.resources.cluster import joins_running_cluster
from verl.utils.atomic_files import replacing
from verl.utils.fault_reports import RunError
from verl.utils.folder_lock import hold_folder

# Keys that define a run's method; a run that resumes must have the same values.
METHOD = (
    "actor_rollout_ref.model.path",
    *(f"actor_rollout_ref.model.{key}" for key in ("lora_rank", "lora_alpha", "lora.use_rslora", "lora_adapter_path")),
    *(f"actor_rollout_ref.model.{key}" for key in ("target_modules", "exclude_modules")),
    "actor_rollout_ref.rollout.tree",
    "actor_rollout_ref.rollout.environment",
    "algorithm.adv_estimator",
    "data.sampler.band",
    "actor_rollout_ref.actor.policy_loss.loss_mode",
)
METHOD_FILE = "method.json"


def check_resume_path(config: DictConfig) -> None:
    """Check that trainer.resume_from_path names a checkpoint, if the run is to resume from it."""
    if config.trainer.resume_mode == "resume_path":
        source = Path(str(config.trainer.resume_from_path))
        if not (source / "actor").is_dir():
            raise ValueError(f"trainer.resume_from_path={source} holds no checkpoint (no folder 'actor')")
        if not re.fullmatch(r"global_step_\d+", source.name):
            raise ValueError(f"trainer.resume_from_path={source} must end in global_step_N: N is the step")


def check_same_method(config: DictConfig) -> None:
    """Check that the checkpoint from which the run would resume automatically was made by the same method."""
    run_dir = Path(config.trainer.default_local_dir)
    file = run_dir / METHOD_FILE
    if config.trainer.resume_mode != "auto" or not complete_steps(run_dir) or not file.exists():
        return
    earlier = json.loads(file.read_text())
    for key in METHOD:
        value = str(OmegaConf.select(config, key))
        if earlier.get(key, value) != value:  # older versions wrote fewer keys
            raise ValueError(
                f"{run_dir} holds a run with {key}={earlier[key]}, which this one with {value} would resume: "
                "choose another trainer.experiment_name (in scripts EXPERIMENT_NAME), or trainer.resume_mode=disable"
            )


def check_resumed_step(config: DictConfig) -> None:
    """Check that the run does not end before the step of the checkpoint from which it would resume automatically."""
    trainer = config.trainer
    steps, total = complete_steps(trainer.default_local_dir), trainer.get("total_training_steps")
    if trainer.resume_mode == "auto" and steps and total and steps[-1] > total and not trainer.get("val_only"):
        check_steps_left(steps[-1], total, trainer.default_local_dir)


def describe_start(config: DictConfig) -> str:
    """Return the step from which the run would go on, for the plan."""
    trainer, steps = config.trainer, complete_steps(config.trainer.default_local_dir)
    if trainer.resume_mode == "resume_path":
        return f"resumes from {trainer.resume_from_path}"
    if trainer.resume_mode == "auto" and steps:
        return f"resumes after step {steps[-1]}, the last complete checkpoint there"
    return f"step 1, with trainer.resume_mode={trainer.resume_mode}" if steps else "step 1"


def check_steps_left(step: int, total_steps: int, run_dir: str) -> None:
    """Print that the run is complete, if its last checkpoint belongs to its last step; raise RunError if it belongs
    to a later one."""
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


def lock_run_dir(config: DictConfig) -> None:
    """Lock the run's folder until this process ends, if the launcher has not; raise ValueError if it is in use."""
    run_dir = config.trainer.default_local_dir
    if os.environ.get("VERL_LOCKED_DIR") != os.path.realpath(run_dir):
        hold_folder(Path(run_dir))


def prepare_run_dir(config: DictConfig) -> None:
    """Create the run's folder and method file, and make upstream resume from a complete checkpoint. If the run joins a
    running cluster, clear the keys that `ray.init` would refuse."""
    run_dir = Path(config.trainer.default_local_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    with replacing(run_dir / METHOD_FILE) as unfinished:
        unfinished.write_text(json.dumps({key: str(OmegaConf.select(config, key)) for key in METHOD}, indent=1))
    if joins_running_cluster(config):  # ray.init refuses these keys together with the address of a running cluster
        for key in {"num_cpus", "num_gpus", "object_store_memory"} & config.ray_kwargs.ray_init.keys():
            config.ray_kwargs.ray_init[key] = None
    if config.trainer.resume_mode == "auto" and (repaired := repair_tracker(run_dir)):
        print(f"note: {repaired}", file=sys.stderr)
