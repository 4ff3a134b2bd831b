"""A mixin of trainers by which a run that hangs or cannot learn ends, with the first cause in its message.

hangs               the phase and what it waits for, after `trainer.progress_timeout` s (`ProgressWatch`)
failed rollouts     the first one's error, where all of a step's prompts failed
skipped updates     three in a row, or all of a run: upstream skips those whose gradients are not finite
"""

import math
import shutil
from collections.abc import Callable
from functools import wraps
from pathlib import Path

import ray
import torch
from omegaconf import DictConfig
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from verl.trainer.checkpoint_marker import complete_steps, damaged_files
from verl.trainer.ppo.v1.batch_rows import BatchRows
from verl.trainer.ppo.v1.fillers import correct_counts
from verl.trainer.ppo.v1.tree_buffer import RolloutsFailed
from verl.trainer.progress_watch import ProgressWatch
from verl.trainer.shared_folder import check_shared_folder
from verl.trainer.steps_left import check_steps_left
from verl.utils.fault_reports import RunError, cause_of, report_fault
from verl.workers.rollout.group_counts import GroupCounts

# the trainer's method -> the phase in which it is
PHASES = {
    "_setup": "start of the workers and the engines",
    "on_init_end": "first delivery of the weights to the engines",
    "_validate": "validation",
    "step": "rollout",
    "on_sample_end": "pause of the engines",
    "_compute_reward_colocate": "rewards of the reward model",
    "_balance_batch": "preparation of the batch",
    "_compute_old_log_prob": "old log-probabilities",
    "_compute_ref_log_prob": "log-probabilities of the reference policy",
    "_compute_values": "values of the critic",
    "_compute_advantage": "advantages",
    "_update_critic": "update of the critic",
    "_update_actor": "update of the actor",
    "_save_checkpoint": "checkpoint",
    "on_step_end": "delivery of the weights to the engines",
}
PROMPT_STATES = ("pending", "running", "finished", "failure")
SKIPPED_IN_A_ROW = 3
# a loss scale of float16 begins too high, and skips until it fits
SKIPPED_IN_A_ROW_FLOAT16 = 20
FULL_DISK_MEGABYTES = 64
# columns of a batch that an update reads, in the order in which they are made
READ_BY_UPDATES = ("rm_scores", "rollout_log_probs", "old_log_probs", "ref_log_prob", "advantages")


class WatchedRun:
    """Mixin of trainers, before upstream's class."""

    # upstream asks for this name to choose buffer and checkpoint format
    upstream_mode: str

    def __init__(self, config: DictConfig):
        config = config.copy()
        config.trainer.v1.trainer_mode = self.upstream_mode
        self.updates = self.skipped_updates = self.skipped_in_a_row = 0
        self.prompt_states: dict[str, int] = {}
        dtype = config.actor_rollout_ref.actor.fsdp_config.get("dtype")
        self.most_skipped = SKIPPED_IN_A_ROW_FLOAT16 if dtype in ("float16", "fp16") else SKIPPED_IN_A_ROW
        seconds = config.trainer.get("progress_timeout")
        self.watch = ProgressWatch(
            seconds or math.inf, lambda: tuple(self.prompt_states.values()), self._waits_for, report_fault
        )
        for name, phase in PHASES.items():
            setattr(self, name, self._in_phase(phase, getattr(self, name)))
        super().__init__(config)
        self._remember_prompt_states()
        if seconds:
            self.watch.start()

    def _in_phase(self, phase: str, method: Callable) -> Callable:
        @wraps(method)
        def call(*args, **kwargs):
            step = getattr(self, "global_steps", 0)
            with self.watch.phase(f"{phase} (step {step})" if step else phase):
                return method(*args, **kwargs)

        return call

    # ---- hangs ----

    def _remember_prompt_states(self) -> None:
        """Keep how many prompts are in which state, whenever the buffer has asked for it; while it asks it has none."""
        buffer = self.replay_buffer
        ask = buffer._sync_metadata_from_transfer_queue

        def ask_and_remember() -> None:
            ask()
            sets = {state: getattr(buffer, f"{state}_keys") for state in PROMPT_STATES}
            self.prompt_states = {state: sum(map(len, keys.values())) for state, keys in sets.items()}

        buffer._sync_metadata_from_transfer_queue = ask_and_remember

    def _waits_for(self) -> str:
        states = self.prompt_states
        if not states.get("pending", 0) + states.get("running", 0):
            return ""
        return "; prompts: " + ", ".join(f"{number} {state}" for state, number in states.items())

    # ---- failed rollouts ----

    def step(self, metrics: dict, timing_raw: dict):
        self._take_counts("train")
        try:
            return super().step(metrics, timing_raw)
        except Exception as error:
            counts = self._take_counts("train")
            if counts.failed and (not counts.finished or isinstance(error, RolloutsFailed)):
                raise RunError(f"step {self.global_steps}: {counts}") from error
            raise

    def _add_prompts_to_generate(self, *args, **kwargs):
        counts = self._counts("train")
        if counts.failed >= self.config.data.train_batch_size and not counts.finished:
            raise RunError(f"step {self.global_steps}: {counts}")
        return super()._add_prompts_to_generate(*args, **kwargs)

    def _validate(self) -> dict[str, float]:
        self._take_counts("val")
        try:
            metrics = super()._validate()
        except Exception as error:
            counts = self._take_counts("val")
            if counts.failed and not counts.finished:
                raise RunError(f"validation: {counts}") from error
            raise
        counts = self._take_counts("val")
        if counts.failed and not counts.finished:
            raise RunError(f"validation: {counts}")
        return metrics | ({"val-aux/failed_prompts": counts.failed} if counts.failed else {})

    def _counts(self, partition: str, take: bool = False) -> GroupCounts:
        """Return what the rollout's workers have counted since the last `_take_counts`."""
        counts = getattr(getattr(self, "agent_loop_manager", None), "group_counts", None)
        try:
            return counts(partition, take) if counts else GroupCounts()
        except ray.exceptions.RayError:  # a worker has died or hangs, which another message says
            return GroupCounts()

    def _take_counts(self, partition: str) -> GroupCounts:
        return self._counts(partition, take=True)

    # ---- checkpoints ----

    def _save_checkpoint(self):
        folder = Path(self.config.trainer.default_local_dir)
        try:
            super()._save_checkpoint()
        except RunError:
            raise
        except Exception as error:
            free = shutil.disk_usage(folder).free / 2**20
            why = "the disk is full" if free < FULL_DISK_MEGABYTES else cause_of(error)
            raise RunError(
                f"step {self.global_steps}: the checkpoint was not written to {folder}: {why} ({free:.0f} MB are free)"
            ) from error

    def _load_checkpoint(self):
        try:
            super()._load_checkpoint()
        except Exception as error:
            if not self.global_steps:
                raise
            raise RunError(self._explain_damage(error)) from error

    def _explain_damage(self, error: Exception) -> str:
        trainer = self.config.trainer
        run_dir = Path(trainer.default_local_dir)
        folder = run_dir / f"global_step_{self.global_steps}"
        if trainer.resume_mode == "resume_path":
            folder = Path(trainer.resume_from_path)
        damaged = ", ".join(map(str, damaged_files(folder)))
        older = [step for step in complete_steps(run_dir) if step < self.global_steps]
        advice = "remove the folder to begin anew"
        if older:
            source = f"trainer.resume_from_path={run_dir / f'global_step_{older[-1]}'}"
            advice = f"trainer.resume_mode=resume_path {source} resumes from step {older[-1]}"
        return (
            f"{folder} cannot be resumed from ({f'damaged: {damaged}' if damaged else cause_of(error)}), and the same "
            f"command would fail again: {advice}"
        )

    # ---- skipped updates ----

    def _setup(self):
        super()._setup()
        if self.config.trainer.save_freq > 0:
            check_shared_folder(self.actor_rollout_wg.workers, self.config.trainer.default_local_dir)
        update = self.actor_rollout_wg.update_actor

        def update_and_count(batch):
            output = update(batch)
            self._count_updates(output["metrics"].get("grad_norm", []), batch)
            return output

        self.actor_rollout_wg.update_actor = update_and_count

    def _count_updates(self, grad_norms: list[float], batch) -> None:
        for grad_norm in grad_norms:
            skipped = not math.isfinite(grad_norm)
            self.updates += 1
            self.skipped_updates += skipped
            self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
            if self.skipped_in_a_row >= self.most_skipped:
                raise RunError(
                    f"step {self.global_steps}: the last {self.skipped_in_a_row} updates were skipped, because their "
                    f"gradients are not finite: {_not_finite(batch)}"
                )

    def _update_actor(self, batch, metrics: dict):
        before = self.skipped_updates
        batch = super()._update_actor(batch, metrics)
        metrics["actor/skipped_updates"] = self.skipped_updates - before
        return batch

    def _compute_metrics(self, batch, metrics: dict, *args, **kwargs) -> None:
        super()._compute_metrics(batch, metrics, *args, **kwargs)
        correct_counts(metrics, batch.tags, self.config.data.max_response_length)

    def fit(self, agent_loop_manager):
        trainer = self.config.trainer
        if not trainer.get("val_only"):
            check_steps_left(self.global_steps, self.total_training_steps, trainer.default_local_dir)
        try:
            super().fit(agent_loop_manager)
        except RunError:
            raise
        except Exception as error:
            raise RunError(f"{self.watch.failed_in or 'the run'}: {cause_of(error)}") from error
        finally:
            self.watch.end()
        if self.updates and self.skipped_updates == self.updates:
            raise RunError(
                f"all {self.updates} updates of this run were skipped, because their gradients are not finite: nothing "
                "was learnt"
            )


def _not_finite(batch) -> str:
    """Return which column of the batch is the first that holds NaN or infinity."""
    rows = BatchRows(batch)
    for name in READ_BY_UPDATES:
        if not torch.isfinite(rows.tokens(name, 0.0).float()).all():
            return f"the first values that are not are those of {name}"
    return "all values that the loss reads are, so that it is the loss itself"


@register_trainer("watched_sync")
class WatchedSyncTrainer(WatchedRun, PPOTrainerSync):
    """Upstream's synchronous trainer and nothing else, in a run that is watched."""

    upstream_mode = "sync"
