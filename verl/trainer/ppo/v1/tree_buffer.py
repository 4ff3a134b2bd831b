"""Replay buffers that replace groups without a signal until a batch is full.

Upstream's buffer (verl 0.9.1, trainer_mode=sync) submits two prompts for each dropped group, puts failed groups into
the batch, and ignores `algorithm.filter_groups.max_num_gen_batches`. `TreeBuffer` submits prompts by the measured share
of useful groups, replaces failed groups, and ends the run with advice at the bound. A batch does not depend on the
speed of groups: it holds the first `batch_size` useful groups in the order of the data, and the next step begins with
the prompt after them, also after a resumption: prompts that were generated in vain are asked again.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any

from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import (
    DAPO_FILTERED_REWARD_COUNTS_KEY,
    ReplayBuffer,
    ReplayBufferAsync,
    _accumulate_eviction_metrics,
)
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils.skip import SkipManager

from verl.trainer.ppo.v1.batch_rows import BatchRows
from verl.trainer.ppo.v1.trainer_state import load_state, save_state
from verl.workers.config.schedule import filters_groups

# part of the expected number of prompts of a batch that may be generated in vain, to avoid another wave of prompts
SURPLUS = 0.08
# number of steps whose largest share of useful groups is expected: more prompts can be asked later, but not fewer
REMEMBERED_STEPS = 3
STATE_FILE = "prompts.pkl"
# batches of prompts after which a step ends the run if not one group is useful
HOPELESS_BATCHES = 20


class RolloutsFailed(RuntimeError):
    """More rollouts of a step failed than a batch has prompts."""


class _ShowsDropped:
    """Finds the groups whose rewards do not vary, and calls `on_drop` with their rows before the buffer drops them."""

    def __init__(self, *args, on_drop: Callable[[KVBatchMeta], None] | None = None, **kwargs):
        super().__init__(*args, **kwargs)
        self.on_drop = on_drop

    def _dapo_filtered_keys(self, partition_id: str) -> tuple[set[str], Counter]:
        """Return upstream's keys and those of groups of a single trajectory, which has nothing to be compared with."""
        try:
            zero_variance, counts = super()._dapo_filtered_keys(partition_id)
        except (TypeError, ValueError) as error:
            raise RuntimeError(f"the reward's {self.filter_groups_metric} must be a number: {error}") from error
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
    """Upstream's buffer for asynchronous schedules, which replaces each dropped or failed group by one prompt, forever;
    `WatchedRun` ends a run whose groups all fail."""


class PromptSupply:
    """The prompts that this step has asked for, and those kept for it; `fetch` returns the data's next one."""

    def __init__(self, fetch: Callable[[], TensorDict]):
        self.fetch = fetch
        self.asked: dict[str, TensorDict] = {}  # this step's prompts by uid, in the order of the data
        self.kept: list[TensorDict] = []
        self.shares: list[float] = []  # share of useful groups in each of the last steps

    def next(self) -> TensorDict:
        """Return the next prompt: a kept one, or else a new one."""
        prompt = self.kept.pop(0) if self.kept else self.fetch()
        self.asked[list(prompt["uid"])[0]] = prompt.copy()  # the submission adds columns to the original
        return prompt

    def useful_share(self, useful: int, judged: int, batch_size: int) -> float:
        """Return the expected share of useful groups: this step's, of the groups that have ended without a failure,
        with the last steps counted as half a batch."""
        expected = max(self.shares, default=1.0)
        return (useful + expected * batch_size / 2) / (judged + batch_size / 2)

    def end_step(self, unused: Collection[str], share: float) -> None:
        """Keep the prompts that were not used, and remember the share of useful groups, above 0."""
        self.kept = [prompt for uid, prompt in self.asked.items() if uid in unused] + self.kept
        self.asked, self.shares = {}, [*self.shares, share][-REMEMBERED_STEPS:]


class TreeBuffer(_ShowsDropped, ReplayBuffer):
    """Upstream's buffer for `schedule=sync` with `algorithm.filter_groups`; it asks for prompts by `prompts_to_run`, in
    all for at most `max_num_gen_batches` batches of them (0: no bound)."""

    def __init__(self, *args, supply: PromptSupply, max_num_gen_batches: int, **kwargs):
        super().__init__(*args, **kwargs)
        self.supply, self.max_num_gen_batches = supply, max_num_gen_batches

    @SkipManager.annotate_tq(role="rollout_tq", phase="sample")
    def sample(self, global_steps: int, partition_id: str, batch_size: int):
        """Return a full batch of useful groups, and metrics; the caller has already submitted a batch of prompts."""
        if partition_id == "val":
            return super().sample(global_steps, partition_id, batch_size)
        failed, judged, metrics, last_debug_time = set(), {}, {}, 0.0
        while True:
            self._sync_metadata_from_transfer_queue()
            equal, _ = self._dapo_filtered_keys(partition_id)
            useful = self.finished_keys[partition_id] - equal
            running = self.pending_keys[partition_id] | self.running_keys[partition_id]
            judged |= dict.fromkeys(equal, False) | dict.fromkeys(useful, True)
            failed |= self.failure_keys[partition_id]
            if len(failed) > batch_size:
                failures = f"{len(failed)} rollouts failed for a batch of {batch_size}"
                raise RolloutsFailed(f"{failures}; the log tells each one's error")
            asked = list(self.supply.asked)
            candidates = [uid for uid in asked if uid in useful or uid in running]
            # What comes before the batch's last prompt has been used; what comes after it is kept for the next step.
            last = candidates[batch_size - 1] if len(candidates) >= batch_size else asked[-1]
            used = set(asked[: asked.index(last) + 1])
            self._drop(global_steps, partition_id, equal & used, self.failure_keys[partition_id] & used, metrics)
            if len(useful) >= batch_size and not running:
                break
            if len(useful) < batch_size:
                share = self.supply.useful_share(sum(judged.values()), len(judged), batch_size)
                needed = prompts_to_run(batch_size - len(useful), batch_size, share)
                if more := self._allowed(needed - len(running), len(running), len(useful), batch_size, metrics):
                    self.refill_fn(more)
                    continue
            last_debug_time = self._wait_for_next_poll(partition_id, last_debug_time)
        chosen = [uid for uid in asked if uid in useful][:batch_size]
        unused = set(asked) - used
        _, rows, _ = self._select_prompt_uids(partition_id, set(chosen), batch_size)
        self._clear_groups(partition_id, unused)
        self.supply.end_step(unused, sum(judged.values()) / len(judged))
        metrics["training/filter_groups/gen_batches"] = len(asked) / batch_size
        metrics["training/filter_groups/discarded_surplus_samples"] = len(unused)
        return self._materialize_batch(partition_id, chosen, rows), metrics

    def _drop(self, global_steps: int, partition_id: str, equal: set[str], failed: set[str], metrics: dict) -> None:
        values = self._dapo_classification_cache[partition_id]
        counts = Counter(values[uid] for uid in equal if values.get(uid) is not None)
        *_, evicted = self._evict_terminal_groups(global_steps, partition_id, (set(), equal, failed, counts))
        _accumulate_eviction_metrics(metrics, evicted, stale_count=0)

    def _allowed(self, needed: int, running: int, useful: int, batch_size: int, metrics: dict) -> int:
        """Return how many of the needed prompts may be submitted; raise RuntimeError if no more may and none runs."""
        generated = len(self.supply.asked)
        batches = self.max_num_gen_batches or (math.inf if useful else HOPELESS_BATCHES)
        in_flight = self.max_inflight_gen_batches * batch_size - running
        allowed = int(min(needed, in_flight, batches * batch_size - generated))
        if allowed <= 0 and not running:
            raise RuntimeError(
                f"of {generated} prompts only {useful} gave groups whose {self.filter_groups_metric} varies (number of "
                f"groups by its value: {metrics.get(DAPO_FILTERED_REWARD_COUNTS_KEY, {})}), and algorithm.filter_groups"
                f".max_num_gen_batches={self.max_num_gen_batches} allows no more: if all are wrong, compare the format "
                "in the prompts with the reward's; else raise the bound (0: none), rollout.n or the temperature"
            )
        return max(0, allowed)


def prompts_to_run(missing: int, batch_size: int, share: float) -> int:
    """Return the number of prompts that should be running to fill a batch.

    This is the expected number, minus its standard deviation if that is large and plus it if it is small, compared with
    the batch: a surplus costs more in a small batch, and another wave of prompts costs more in a large one. `missing`
    useful groups are expected to be a `share` (above 0) of the prompts.
    """
    expected = missing / share
    deviation = math.sqrt(expected * (1 - share) / share)
    enough = expected - deviation + min(SURPLUS * batch_size / share, 2 * deviation)
    # More than a batch, which keeps the engine busy, runs only if it will almost certainly be used.
    return math.ceil(max(missing, min(enough, batch_size), expected - 2 * deviation) - 1e-9)


def buffer_options(trainer) -> dict[str, Any]:
    """Return the options that all buffers share: the trainer's settings, and its components' hook `on_drop`."""
    sampler = trainer.config.trainer.v1.sampler

    def on_drop(batch: KVBatchMeta) -> None:
        for component in getattr(trainer, "components", ()):
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


class FilteredPrompts(PPOTrainer):
    """Mixin of synchronous trainers, which fill a batch by `TreeBuffer` if the config has `algorithm.filter_groups`."""

    supply: PromptSupply | None = None

    def _build_replay_buffer(self):
        config = self.config
        if not filters_groups(config):
            return super()._build_replay_buffer()
        filters, self.supply = config.algorithm.filter_groups, PromptSupply(super()._fetch_one_gen_batch)
        return TreeBuffer(
            **buffer_options(self),
            supply=self.supply,
            train_batch_size=config.data.train_batch_size,
            gen_batch_size=1,
            max_inflight_gen_batches=filters.get("max_inflight_gen_batches") or 1,
            max_num_gen_batches=filters.get("max_num_gen_batches") or 0,
        )

    def _fetch_one_gen_batch(self) -> TensorDict:
        return self.supply.next() if self.supply else super()._fetch_one_gen_batch()

    def _save_checkpoint(self):
        if self.supply:
            save_state(self, STATE_FILE, {"kept": self.supply.kept, "shares": self.supply.shares})
        super()._save_checkpoint()

    def _load_checkpoint(self):
        super()._load_checkpoint()
        if self.supply and (state := load_state(self, STATE_FILE)):
            self.supply.kept, self.supply.shares = state["kept"], state["shares"]
