"""A mixin of trainers that ends a run that hangs or cannot learn, with the first cause in the message.

hangs               the phase, after `trainer.progress_timeout` s (`ProgressWatch`)
failed rollouts     the error of the first one, if a step's prompts failed
skipped updates     three in a row, or all of a run: upstream skips updates whose gradients are not finite
nonsense            columns with NaN; all gradients of a run 0; a warning if the first batches' rewards are all equal
checkpoints         a folder that not all workers see, a damaged file

At its end it closes the trackers. Upstream (verl 0.9.1) leaves that to the interpreter, which may be killed before.
Workers fetch only tensors and pictures (`send_tensors_only`).
"""

import logging
import math
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import wraps

import ray
from omegaconf import DictConfig
from verl.protocol import DataProtoFuture
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from verl.trainer.checkpoint_marker import forget_marks_from
from verl.trainer.checks.resources.disk import check_shared_folder
from verl.trainer.checks.run_dir import check_steps_left
from verl.trainer.ppo.v1.batch_rows import BatchRows, not_finite, send_tensors_only, zero_equal_groups
from verl.trainer.ppo.v1.row_order import correct_counts
from verl.trainer.ppo.v1.trainer_state import loaded_folder
from verl.trainer.ppo.v1.tree_buffer import FilteredPrompts, RolloutsFailed
from verl.trainer.watches import START_SECONDS, ProgressWatch
from verl.utils.fault_reports import RunError, cause_of, report_fault, reported_faults
from verl.workers.rollout.group_counts import GroupCounts

logger = logging.getLogger(__name__)

SET_UP = "start of the workers and the engines"
# Name of each of the trainer's methods, and of its phase.
PHASES = {
    "_setup": SET_UP,
    "on_init_end": "first delivery of the weights to the engines",
    "fit": "training loop",
    "_validate": "validation",
    "step": "rollout, reference policy or critic",
    "_compute_old_log_prob": "old log-probabilities",
    "_compute_advantage": "advantages",
    "_update_actor": "update of the actor",
    "_save_checkpoint": "checkpoint",
    "on_step_end": "delivery of the weights to the engines",
}
# Part of upstream's message if no prompt of a batch has a row.
NO_ROWS = "no materializable trajectories"
SKIPPED_IN_A_ROW = 3
WARNED_BATCHES = 3  # first batches with equal rewards
IDLE_UPDATES = 10  # fewest updates of a run that may not all have gradients of 0
# The loss scale of float16 begins too high, and updates are skipped until it fits.
SKIPPED_IN_A_ROW_FLOAT16 = 20


class WatchedRun:
    """Mixin that precedes upstream's trainer class; it sets `trainer.v1.trainer_mode` to `upstream_mode`."""

    # Upstream chooses the buffer and the checkpoint format by this name.
    upstream_mode: str

    def __init__(self, config: DictConfig):
        config.trainer.v1.trainer_mode = self.upstream_mode
        self.updates = self.skipped_updates = self.idle_updates = self.equal_batches = 0
        self.rewards_varied, self.equal_rewards = False, ""
        self.warned: set[str] = set()  # phases whose failed groups were printed
        self.rows: BatchRows | None = None  # the rows whose advantages are computed next
        self.skipped_in_a_row: dict[str, int] = {}  # number of updates by role
        dtype = config.actor_rollout_ref.actor.fsdp_config.get("dtype")
        self.most_skipped = SKIPPED_IN_A_ROW_FLOAT16 if dtype in ("float16", "fp16") else SKIPPED_IN_A_ROW
        seconds = config.trainer.get("progress_timeout")
        self.watch = ProgressWatch(seconds or math.inf, self._progress, report_fault)
        self._save_checkpoint = self._without_older_marks(self._save_checkpoint)
        for name, phase in PHASES.items():
            setattr(self, name, self._in_phase(phase, getattr(self, name)))
        super().__init__(config)
        self.watch.start()

    def _in_phase(self, phase: str, method: Callable) -> Callable:
        at_least = START_SECONDS if phase == SET_UP else 0.0

        @wraps(method)
        def call(*args, **kwargs):
            step = getattr(self, "global_steps", 0)
            name = f"{phase} (step {step})" if step else phase
            try:
                with self.watch.phase(name, at_least):
                    return method(*args, **kwargs)
            except Exception:
                raise
            except BaseException as error:  # Ray would take it for an end on purpose, or for a cancelled call
                raise RunError(f"{name}: {cause_of(error)}") from error

        return call

    # ---- hangs ----

    def _progress(self) -> tuple:
        counts = self._counts("train") + self._counts("val")
        return counts.finished, counts.failed

    # ---- failed rollouts ----

    def step(self, metrics: dict, timing_raw: dict):
        skipped = self.skipped_updates
        try:
            batch = super().step(metrics, timing_raw)
        except Exception as error:
            if isinstance(error, RolloutsFailed) or NO_ROWS in str(error):
                self._raise_with_failures(f"step {self.global_steps}", "train", error)
            raise
        if faults := reported_faults():  # another process's, which the driver may not have read yet
            raise RunError(faults[0])
        if (counts := self._counts("train", take=True)).failed:
            metrics["training/failed_prompts"] = counts.failed
            self._warn_of_failures("training", counts)
        metrics["actor/skipped_updates"] = self.skipped_updates - skipped
        return batch

    def _add_prompts_to_generate(self, *args, **kwargs):
        counts = self._counts("train")
        if counts.failed > self.config.data.train_batch_size:
            raise RunError(f"step {self.global_steps}: {counts}")
        return super()._add_prompts_to_generate(*args, **kwargs)

    def _validate(self) -> dict[str, float]:
        self._counts("val", take=True)
        try:
            metrics = super()._validate()
        except Exception as error:
            self._raise_with_failures("validation", "val", error)
            raise
        counts = self._counts("val", take=True)
        if counts.failed and not counts.finished:
            raise RunError(f"validation: {counts}")
        if not counts.failed:
            return metrics
        self._warn_of_failures("validation", counts)
        return metrics | {"val-aux/failed_prompts": counts.failed}

    def _warn_of_failures(self, phase: str, counts: GroupCounts) -> None:
        """Print the first counts with failed groups of a phase; the metrics have those of later steps."""
        if phase not in self.warned:
            self.warned.add(phase)
            print(f"warning: step {self.global_steps}, {phase}: {counts}", file=sys.stderr, flush=True)

    def _raise_with_failures(self, what: str, partition: str, error: Exception) -> None:
        counts = self._counts(partition, take=True)
        if counts.failed:
            raise RunError(f"{what}: {counts}") from error

    def _counts(self, partition: str, take: bool = False) -> GroupCounts:
        """Return the counts of the rollout's workers since they were last taken."""
        counts = getattr(getattr(self, "agent_loop_manager", None), "group_counts", None)
        try:
            return counts(partition, take) if counts else GroupCounts()
        except ray.exceptions.RayError:  # a worker has died or hangs; another message reports it
            return GroupCounts()

    # ---- checkpoints ----

    def _without_older_marks(self, save: Callable) -> Callable:
        """Return a save that first removes the marks of checkpoints from this step on."""

        @wraps(save)
        def call() -> None:
            forget_marks_from(self.config.trainer.default_local_dir, self.global_steps)
            save()

        return call

    def _load_checkpoint(self):
        trainer = self.config.trainer
        if trainer.save_freq > 0:
            check_shared_folder(self.actor_rollout_wg.workers, trainer.default_local_dir)
        try:
            super()._load_checkpoint()
        except Exception as error:
            if not self.global_steps:
                raise
            raise RunError(
                f"{loaded_folder(self)} cannot be resumed from: {cause_of(error)}; unless this cause is removed, the "
                "same command would fail again: resume from an older checkpoint (docs/resume.md)"
            ) from error

    # ---- updates ----

    def _setup(self):
        super()._setup()
        send_tensors_only(self.actor_rollout_wg, "compute_log_prob", "update_actor")
        self._count_updates_of("actor", self.actor_rollout_wg, "update_actor")
        if self.use_reference_policy and not self.ref_in_actor:
            send_tensors_only(self.ref_policy_wg, "compute_ref_log_prob")
        if self.use_critic:
            send_tensors_only(self.critic_wg, "infer_batch", "train_mini_batch")
            self._count_updates_of("critic", self.critic_wg, "train_mini_batch")

    def _count_updates_of(self, role: str, workers, method: str) -> None:
        update = getattr(workers, method)

        def update_and_count(batch):
            output = update(batch)
            done = output.get() if isinstance(output, DataProtoFuture) else output  # the critic's comes later
            for grad_norm in done["metrics"].get("grad_norm", []):
                self._count_update(role, grad_norm, batch)
            return output

        setattr(workers, method, update_and_count)

    def _count_update(self, role: str, grad_norm: float, batch) -> None:
        skipped = not math.isfinite(grad_norm)
        self.updates += 1
        self.skipped_updates += skipped
        self.idle_updates += grad_norm == 0
        self.skipped_in_a_row[role] = self.skipped_in_a_row.get(role, 0) + 1 if skipped else 0
        if self.skipped_in_a_row[role] >= self.most_skipped:
            culprit = not_finite(BatchRows(batch))
            why = f"so are {culprit}" if culprit else "all that the loss reads is, so that it is the loss itself"
            raise RunError(
                f"step {self.global_steps}: the last {self.skipped_in_a_row[role]} updates of the {role} were "
                f"skipped, because their gradients are not finite: {why}"
            )

    def _compute_old_log_prob(self, batch, metrics: dict):
        self.rows = BatchRows(batch)
        with ThreadPoolExecutor(1) as pool:  # otherwise the driver only waits for the workers here
            report = pool.submit(self._report_rollouts, self.rows)
            with self.rows.held():
                super()._compute_old_log_prob(batch, metrics)
        metrics.update(report.result())
        return self.rows.batch

    def _compute_advantage(self, batch, metrics: dict):
        rows = self.rows if self.rows and self.rows.keys == list(batch.keys) else BatchRows(batch)
        self.rows = None
        made = {"ref_log_prob": self.use_reference_policy, "values": self.use_critic}
        absent = [name for name, is_made in made.items() if not is_made]
        with rows.held(*self._columns_of_rollouts(), "old_log_probs", *made, absent=absent), self._credit_context(rows):
            super()._compute_advantage(batch, metrics)
            if culprit := not_finite(rows):
                raise RunError(f"step {self.global_steps}: nothing can be learnt from NaN or infinity: {culprit}")
            self._watch_rewards(rows, metrics)
            zero_equal_groups(rows, self.config.algorithm)
            self._after_advantages(rows, metrics)
        return rows.batch

    def _report_rollouts(self, rows: BatchRows) -> dict[str, float]:
        """Fetch the columns of the rollouts, and return metrics of them; runs while the workers compute."""
        rows.fetch(*self._columns_of_rollouts())
        return {}

    def _columns_of_rollouts(self) -> Sequence[str]:
        """Return the columns of the rollouts that `_report_rollouts` and the advantages read."""
        return ("uid", "response_mask", "rm_scores", "rollout_log_probs")

    def _credit_context(self, rows: BatchRows) -> AbstractContextManager:
        """Return a context in which the advantages are computed."""
        return nullcontext()

    def _after_advantages(self, rows: BatchRows, metrics: dict) -> None:
        """Called before the advantages are sent, which `rows.put` may change."""

    def _watch_rewards(self, rows: BatchRows, metrics: dict) -> None:
        """Count the batches in a row whose rewards are all equal, and warn once if those of no batch have varied."""
        rewards = set(rows.rewards[rows.real].sum(-1).tolist())
        self.equal_batches = self.equal_batches + 1 if len(rewards) == 1 else 0
        self.rewards_varied |= len(rewards) > 1
        metrics["training/batches_with_equal_rewards"] = self.equal_batches
        if self.equal_batches == WARNED_BATCHES and not self.rewards_varied:
            self.equal_rewards = (
                f"all rewards of the first {WARNED_BATCHES} batches are equal, the last are {rewards.pop():g}: compare "
                "the answers that the reward reads with those that prompts ask for, and response_length/… with "
                "data.max_response_length"
            )
            print(f"warning: step {self.global_steps}: {self.equal_rewards}", file=sys.stderr, flush=True)

    def _compute_metrics(self, batch, metrics: dict, *args, **kwargs) -> None:
        super()._compute_metrics(batch, metrics, *args, **kwargs)
        correct_counts(metrics, batch.tags, self.config.data.max_response_length)

    def fit(self, agent_loop_manager):
        trainer = self.config.trainer
        if not trainer.get("val_only"):
            check_steps_left(self.global_steps, self.total_training_steps, trainer.default_local_dir)
        try:
            super().fit(agent_loop_manager)
        except BaseException as error:
            is_run_error = isinstance(error, RunError)
            message = str(error) if is_run_error else f"{self.watch.failed_in or 'training loop'}: {cause_of(error)}"
            report_fault(message)  # reported first, because the end of the services may hang, too
            self._close_trackers(exit_code=1)
            if is_run_error:
                raise
            raise RunError(message) from error
        self._close_trackers(exit_code=0)
        if self.updates and self.skipped_updates == self.updates:
            raise RunError(
                f"all {self.updates} updates of this run were skipped, because their gradients are not finite: nothing "
                "was learnt"
            )
        if self.updates == self.idle_updates + self.skipped_updates and self.updates >= IDLE_UPDATES:
            raise RunError(
                f"all {self.updates} updates of this run had gradients of 0: nothing was learnt. {self.equal_rewards}"
            )

    def _close_trackers(self, exit_code: int) -> None:
        """Make the trackers write what they hold, if upstream has opened them; one that fails here changes nothing."""
        if (trackers := getattr(self, "logger", None)) is not None:
            try:
                trackers.finish(exit_code)
            except Exception as error:
                logger.warning("a tracker of trainer.logger could not be closed: %s", cause_of(error))


@register_trainer("watched_sync")
class WatchedSyncTrainer(WatchedRun, FilteredPrompts, PPOTrainerSync):
    """Upstream's synchronous trainer with `WatchedRun`; groups with equal rewards have advantage 0."""

    upstream_mode = "sync"

    def __init__(self, config: DictConfig):
        super().__init__(config.copy())
