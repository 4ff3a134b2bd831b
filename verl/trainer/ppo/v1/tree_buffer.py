"""Replay buffers that replace groups without a signal one by one, until a batch is full.

Upstream's buffer (verl 0.9.1, trainer_mode=sync) submits two prompts for each dropped group, discards the surplus, and
ignores `algorithm.filter_groups.max_num_gen_batches`. `TreeBuffer` submits one prompt for each dropped or failed group,
so that no useful group is discarded, and ends the run with advice at the bound. A batch does not depend on the speed of
groups: it holds the first `batch_size` useful groups in the order of the data.
"""

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync, _accumulate_eviction_metrics

from verl.trainer.ppo.v1.batch_rows import BatchRows


class RolloutsFailed(RuntimeError):
    """Error for a step that cannot be completed because more rollouts failed than a batch has prompts."""


def check_failures(failed: int, batch_size: int) -> None:
    """Raise RolloutsFailed if more rollouts failed than a batch has prompts."""
    if failed > batch_size:
        raise RolloutsFailed(f"{failed} rollouts failed for a batch of {batch_size}; the log tells each one's error")


class _ShowsDropped:
    """Finds the groups whose rewards do not vary, and shows them to `on_drop` before the buffer drops them.

    Args:
        on_drop: function that is called with the rows about to be dropped, which can still be read.
    """

    def __init__(self, *args, on_drop: Callable[[KVBatchMeta], None] | None = None, **kwargs):
        super().__init__(*args, **kwargs)
        self.on_drop = on_drop

    def _dapo_filtered_keys(self, partition_id: str) -> tuple[set[str], Counter]:
        """Return upstream's keys and those of groups of a single trajectory, which has nothing to be compared with."""
        zero_variance, counts = super()._dapo_filtered_keys(partition_id)
        if partition_id != "val" and self.filter_groups_metric is not None:
            n_rows = Counter(key.split("_")[0] for key in self.partitions[partition_id])
            zero_variance |= {uid for uid in self.finished_keys[partition_id] if n_rows[uid] == 1}
        return zero_variance, counts

    def _evict_terminal_groups(self, global_steps: int, partition_id: str, reasons: tuple):
        _, zero_variance, _, _ = reasons
        if zero_variance and self.on_drop is not None:
            tags = self.partitions[partition_id]
            keys = [key for key in tags if key.split("_")[0] in zero_variance]
            self.on_drop(KVBatchMeta(keys=keys, tags=[tags[key] for key in keys], partition_id=partition_id))
        return super()._evict_terminal_groups(global_steps, partition_id, reasons)


class AsyncTreeBuffer(_ShowsDropped, ReplayBufferAsync):
    """Upstream's buffer for asynchronous schedules, which itself replaces each dropped or failed group by one prompt.

    The run ends if more than `most_failed` groups fail during the wait for one batch. Upstream would replace them
    forever.
    """

    def __init__(self, *args, most_failed: int, **kwargs):
        super().__init__(*args, **kwargs)
        self.most_failed, self.failed = most_failed, 0

    def sample(self, global_steps: int, partition_id: str, batch_size: int):
        """Return upstream's sample; raise RolloutsFailed if too many rollouts fail."""
        self.failed = 0
        try:
            return super().sample(global_steps, partition_id, batch_size)
        finally:
            self.failed = 0  # a wait before sampling (hybrid_rollout.enable_switch) counts separately

    def _evict_terminal_groups(self, global_steps: int, partition_id: str, reasons: tuple):
        self.failed += len(reasons[2])
        check_failures(self.failed, self.most_failed)
        return super()._evict_terminal_groups(global_steps, partition_id, reasons)


class TreeBuffer(_ShowsDropped, ReplayBuffer):
    """Upstream's buffer for `schedule=sync`; with `filter_groups_metric` it replaces groups one by one.

    At most `max_num_gen_batches` batches of prompts may be used to fill a batch; 0 means no bound.
    """

    def __init__(self, *args, max_num_gen_batches: int, **kwargs):
        super().__init__(*args, **kwargs)
        self.max_num_gen_batches = max_num_gen_batches

    def sample(self, global_steps: int, partition_id: str, batch_size: int):
        """Return a full batch of useful groups, and metrics; the caller has already submitted a batch of prompts.

        Raises:
            RuntimeError: `max_num_gen_batches` batches hold too few useful groups, or more than `batch_size` failed.
        """
        if partition_id == "val" or self.filter_groups_metric is None:
            return super().sample(global_steps, partition_id, batch_size)
        generated, failed, metrics, last_debug_time = batch_size, 0, {}, 0.0
        while True:
            self._sync_metadata_from_transfer_queue()
            stale_uids, zero_variance, _, counts = self._terminal_eviction_reasons(global_steps, partition_id)
            reasons = stale_uids, zero_variance, set(self.failure_keys[partition_id]), counts
            failed += len(reasons[2])
            check_failures(failed, batch_size)
            useful = self._sampleable_terminal_keys(partition_id, reasons)
            dropped, stale, _, evicted = self._evict_terminal_groups(global_steps, partition_id, reasons)
            if dropped:
                _accumulate_eviction_metrics(metrics, evicted, stale)
            running = len(self.pending_keys[partition_id]) + len(self.running_keys[partition_id])
            missing = batch_size - len(useful) - running
            if missing <= 0 and not running:
                break
            if missing > 0:
                self._require(generated + missing, len(useful), generated, batch_size)
                self.refill_fn(missing)
                generated += missing
                continue
            last_debug_time = self._wait_for_next_poll(partition_id, last_debug_time)
        metrics["training/filter_groups/gen_batches"] = generated / batch_size
        chosen, rows, _ = self._select_prompt_uids(partition_id, useful, batch_size)
        return self._materialize_batch(partition_id, chosen, rows), metrics

    def _require(self, prompts: int, useful: int, generated: int, batch_size: int) -> None:
        if 0 < self.max_num_gen_batches * batch_size < prompts:
            raise RuntimeError(
                f"of {generated} prompts only {useful} gave groups whose {self.filter_groups_metric} varies, and "
                f"algorithm.filter_groups.max_num_gen_batches={self.max_num_gen_batches} allows no more for "
                f"data.train_batch_size={batch_size}: raise it (0: no bound), raise actor_rollout_ref.rollout.n or the "
                "sampling temperature, choose problems that are neither too easy nor too hard, or set "
                "algorithm.filter_groups.enable=false"
            )


def buffer_options(trainer) -> dict[str, Any]:
    """Return the options that all buffers share: the trainer's settings, and its components' hook `on_drop`."""
    sampler = trainer.config.trainer.v1.sampler

    def on_drop(batch: KVBatchMeta) -> None:
        for component in trainer.components:
            component.on_drop(BatchRows(batch))

    return dict(
        trainer_mode=trainer.trainer_mode,
        trainer_config=trainer.config.trainer.v1.get(trainer.trainer_mode, {}),
        max_off_policy_threshold=sampler.max_off_policy_threshold,
        max_off_policy_strategy=sampler.max_off_policy_strategy,
        sampler_kwargs=sampler.sampler_kwargs,
        refill_fn=trainer._add_prompts_to_generate,
        filter_groups_metric=_filter_groups_metric(trainer),
        on_drop=on_drop,
    )


def _filter_groups_metric(trainer) -> str | None:
    """Return upstream's metric without its warning about `max_num_gen_batches`, which `TreeBuffer` does not ignore."""
    config = trainer.config.copy()
    if config.algorithm.get("filter_groups"):
        config.algorithm.filter_groups.max_num_gen_batches = 0
    return type(trainer)._resolve_filter_groups_metric(SimpleNamespace(config=config))
