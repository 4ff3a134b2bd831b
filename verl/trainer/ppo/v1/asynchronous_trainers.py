"""Trainers with components for upstream's asynchronous schedules.

Differences from the synchronous trainer, in which all of a batch's prompts begin and end within one step:

    a step's batch         holds prompts of this step and of earlier ones; each row keeps the step in which it began
    a dropped group        is replaced by a later prompt as soon as it is dropped; the components see it before
    a checkpoint           holds the rows of unfinished prompts (`transfer_queue/`), as long as it holds weights
    a resumed run          begins unfinished prompts again, with the settings that they would get now

All hooks run once per update; with `separate_async` a step has `parameter_sync_step` updates.
"""

import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import transfer_queue as tq
from tensordict import TensorDict
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync

from verl.trainer.checkpoint_marker import checkpoints
from verl.trainer.ppo.v1.batch_rows import BatchRows, place_of
from verl.trainer.ppo.v1.explore_trainer import ExploreMixin
from verl.trainer.ppo.v1.trainer_state import load_state, save_state
from verl.trainer.ppo.v1.tree_buffer import AsyncTreeBuffer, buffer_options
from verl.workers.config.schedule import SAVED_ROWS

STATE_FILE = "prompts.json"
TRAIN = "train"


class AsyncExploreMixin(ExploreMixin):
    """Mixin that adds components: `class Trainer(AsyncExploreMixin, <upstream's asynchronous trainer>)`."""

    def _build_replay_buffer(self):
        return AsyncTreeBuffer(**buffer_options(self))

    def step(self, metrics: dict, timing_raw: dict):
        batch = super().step(metrics, timing_raw)
        # Upstream averages metrics over a step's updates, which would give the number of prompts of one update.
        rows = BatchRows(batch)
        metrics["tree/prompts"] = len({place_of(rows.keys[row]).uid for row in rows.real})
        return batch

    # ---- unfinished prompts ----

    def _reissue_inflight_prompts(self, partition_id: str = TRAIN) -> int:
        """Send unfinished prompts with new settings: none are saved, and upstream skips `_submit_batch_to_rollout`."""
        manager = self.agent_loop_manager

        def prepare_and_generate(prompts: TensorDict) -> None:
            self._prepare_rollout(prompts)
            manager.generate_sequences(prompts)

        preparing = SimpleNamespace(generate_sequences=prepare_and_generate)
        with patch.object(self, "agent_loop_manager", preparing):
            return super()._reissue_inflight_prompts(partition_id)

    def _save_checkpoint(self):
        save_state(self, STATE_FILE, {"n_prompts": self.n_prompts})
        super()._save_checkpoint()
        remove_old_rows(Path(self.config.trainer.default_local_dir), self.global_steps)

    def _load_checkpoint(self):
        super()._load_checkpoint()
        if state := load_state(self, STATE_FILE):
            self.n_prompts = state["n_prompts"]
        forget_rows_without_prompt()


def remove_old_rows(run_dir: Path, step: int) -> None:
    """Remove the saved rows of checkpoints before `step` whose weights upstream's retention has removed."""
    for saved, folder in checkpoints(run_dir).items():
        if saved < step and not (folder / "actor").exists():
            shutil.rmtree(folder / SAVED_ROWS, ignore_errors=True)


def forget_rows_without_prompt() -> None:
    """Clear restored rows that no step will sample: those of a validation, and those whose prompt is not saved. When
    upstream saves a checkpoint, it has cleared the prompts that the step has just trained on, but not their rows."""
    for partition, tags in (tq.kv_list() or {}).items():
        prompts = {key for key, tag in tags.items() if tag.get("is_prompt") and partition == TRAIN}
        left = [key for key in tags if key not in prompts and key.split("_", 1)[0] not in prompts]
        if left:
            tq.kv_clear(keys=left, partition_id=partition)


@register_trainer("explore_colocate_async")
class ColocateAsyncExploreTrainer(AsyncExploreMixin, PPOTrainerColocateAsync):
    """Trainer of `schedule=colocate_async`: the servers pause from a full batch until they have the new weights."""

    upstream_mode = "colocate_async"


@register_trainer("explore_separate_async")
class SeparateAsyncExploreTrainer(AsyncExploreMixin, PPOTrainerSeparateAsync):
    """Trainer of `schedule=separate_async`: the servers pause only while they get new weights."""

    upstream_mode = "separate_async"
