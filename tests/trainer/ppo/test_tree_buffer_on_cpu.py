"""Groups that tell nothing are replaced: upstream's buffer on a queue in memory, and which prompts a run asks for."""

import random
from collections.abc import Callable
from itertools import count, cycle

import numpy as np
import pytest
from tensordict import NonTensorData, NonTensorStack, TensorDict
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils.tensordict_utils import get_tensordict

from tests.trainer.ppo.toy_step import config_of
from verl.trainer.ppo.v1 import replay_buffer
from verl.trainer.ppo.v1.explore_trainer import ExploreTrainer
from verl.trainer.ppo.v1.tree_buffer import PromptSupply, TreeBuffer
from verl.trainer.ppo.v1.watched_run import WatchedSyncTrainer

N = 3


class Queue:
    """Prompts are answered `delay` polls after they were submitted, prompt i with the outcomes `answers[i]`."""

    def __init__(self, answers: list[list[float]], delays: list[int]):
        self.answers, self.delays = answers, delays
        self.supply = PromptSupply(self.fetch)
        self.tags: dict[str, dict] = {}
        self.outcomes: dict[str, float] = {}
        self.waiting: dict[str, int] = {}
        self.submitted = 0

    def fetch(self) -> TensorDict:
        self.submitted += 1
        return TensorDict({"uid": NonTensorStack(NonTensorData(f"u{self.submitted - 1}"))}, batch_size=1)

    def submit(self, n: int) -> None:
        for _ in range(n):
            uid = list(self.supply.next()["uid"])[0]
            self.tags[uid] = {"is_prompt": True, "status": "pending", "global_steps": 1}
            self.waiting[uid] = self.delays[int(uid[1:]) % len(self.delays)]

    def poll(self, *_) -> float:
        for uid in list(self.waiting):
            self.waiting[uid] -= 1
            if self.waiting[uid] < 0:
                del self.waiting[uid]
                self.tags[uid] = self.tags[uid] | {"status": "finished"}
                for i, outcome in enumerate(self.answers[int(uid[1:])]):
                    self.tags[f"{uid}_{i}_0"], self.outcomes[f"{uid}_{i}_0"] = {"status": "success"}, outcome
        return 0.0

    def kv_list(self):
        return {"train": self.tags}

    def kv_clear(self, keys, partition_id):
        for key in keys:
            del self.tags[key]

    def kv_batch_get(self, keys, partition_id, select_fields):
        extras = [NonTensorData({"reward_extra_info": {"acc": self.outcomes[key]}}) for key in keys]
        return TensorDict({"extra_fields": NonTensorStack(*extras)}, batch_size=len(keys))


def buffer_of(monkeypatch, queue: Queue, max_num_gen_batches: int = 0) -> tuple[TreeBuffer, list[tuple[str, dict]]]:
    dropped: list[tuple[str, dict]] = []
    for name in ("kv_list", "kv_clear", "kv_batch_get"):
        monkeypatch.setattr(replay_buffer.tq, name, getattr(queue, name))
    buffer = TreeBuffer(
        trainer_mode="sync",
        trainer_config={},
        max_off_policy_threshold=None,
        max_off_policy_strategy="drop",
        sampler_kwargs={},
        refill_fn=queue.submit,
        filter_groups_metric="acc",
        supply=queue.supply,
        train_batch_size=4,
        gen_batch_size=1,
        max_num_gen_batches=max_num_gen_batches,
        on_drop=lambda batch: dropped.extend(zip(batch.keys, batch.tags, strict=True)),
    )
    monkeypatch.setattr(buffer, "_wait_for_next_poll", queue.poll)
    return buffer, dropped


def answers(pattern: str) -> list[list[float]]:
    """A letter per prompt: v varies, r is all right, w all wrong, s a single trajectory."""
    return [{"v": [1.0, 0.0, 0.0], "r": [1.0] * N, "w": [0.0] * N, "s": [1.0]}[letter] for letter in pattern]


@pytest.mark.parametrize("delays", [[0], [5, 0, 2], [0, 9], [3, 1, 4, 1, 5]])
def test_the_batch_is_the_first_useful_prompts_whatever_is_faster(monkeypatch, delays):
    queue = Queue(answers("vwrvwvwv" + "v" * 20), delays)
    buffer, dropped = buffer_of(monkeypatch, queue)
    queue.submit(4)
    batch, metrics = buffer.sample(1, "train", 4)
    assert {key.split("_")[0] for key in batch.keys} == {"u0", "u3", "u5", "u7"} and len(batch.keys) == 4 * N
    assert queue.submitted <= 10, "8 were needed"
    assert metrics["training/filter_groups/discarded_surplus_samples"] == queue.submitted - 8
    assert sorted(key for key, _ in dropped) == sorted(f"u{i}_{j}_0" for i in (1, 2, 4, 6) for j in range(N))
    assert all(tag == {"status": "success"} for _, tag in dropped)
    assert metrics["training/filter_groups/evicted_samples"] == 4
    assert metrics["training/filter_groups/gen_batches"] == queue.submitted / 4
    assert not any(tag.get("is_prompt") for tag in queue.tags.values())
    queue.submit(4)
    batch, _ = buffer.sample(2, "train", 4)
    assert {key.split("_")[0] for key in batch.keys} == {"u8", "u9", "u10", "u11"}, "no prompt is skipped"


def sampled(monkeypatch, pattern: str, delays=(0,), bound: int = 0) -> tuple[set[str], dict, list[str]]:
    """The prompts of a batch of 4, its metrics, and the keys of the dropped rows."""
    queue = Queue(answers(pattern), list(delays))
    buffer, dropped = buffer_of(monkeypatch, queue, bound)
    queue.submit(4)
    batch, metrics = buffer.sample(1, "train", 4)
    return {key.split("_")[0] for key in batch.keys}, metrics, [key for key, _ in dropped]


def test_a_single_trajectory_says_nothing(monkeypatch):
    prompts, metrics, dropped = sampled(monkeypatch, "vsvsvvv")
    assert prompts == {"u0", "u2", "u4", "u5"} and dropped == ["u1_0_0", "u3_0_0"]
    assert metrics["training/filter_groups/evicted_samples"] == 2


def test_the_bound_ends_with_advice(monkeypatch):
    with pytest.raises(RuntimeError, match="of 8 prompts only 1 gave .*max_num_gen_batches=2 allows no more"):
        sampled(monkeypatch, "vwww" + "w" * 20, bound=2)
    prompts, metrics, _ = sampled(monkeypatch, "vvvwwwwv", [1], bound=2)
    assert len(prompts) == 4 and metrics["training/filter_groups/gen_batches"] == 2, "exactly at the bound is fine"


@pytest.mark.parametrize(("answer", "value"), [("w", 0.0), ("r", 1.0)])
def test_without_a_bound_a_step_ends_if_nothing_is_useful(monkeypatch, answer, value):
    """Such as with problems that ask for one format, and a reward that reads another."""
    with pytest.raises(RuntimeError, match=f"of 80 prompts only 0 gave .*by its value: {{{value}: 80}}.* the format"):
        sampled(monkeypatch, answer * 1000, [0, 1])


def test_a_rare_useful_group_does_not_end_the_step(monkeypatch):
    prompts, _, _ = sampled(monkeypatch, ("w" * 60 + "v") * 4 + "w" * 80, [0, 1])
    assert prompts == {"u60", "u121", "u182", "u243"}


def test_a_metric_that_is_no_number_is_named(monkeypatch):
    queue = Queue([[0.0, 1.0, 0.0], [0.0, "yes", 1.0]] * 4, [0])
    buffer, _ = buffer_of(monkeypatch, queue)
    queue.submit(2)
    with pytest.raises(RuntimeError, match="the reward's acc must be a number: .*'yes'"):
        buffer.sample(1, "train", 4)


def test_a_step_in_which_every_group_failed_says_so(monkeypatch):
    queue = Queue([], [0])
    buffer, _ = buffer_of(monkeypatch, queue)

    def fail(*_):
        for tag in queue.tags.values():
            tag["status"] = "failure"
        return 0.0

    monkeypatch.setattr(buffer, "_wait_for_next_poll", fail)
    queue.submit(4)
    with pytest.raises(RuntimeError, match="rollouts failed for a batch of 4"):
        buffer.sample(1, "train", 4)


def test_a_failed_group_is_replaced(monkeypatch):
    queue = Queue(answers("vvvvv"), [0])
    buffer, _ = buffer_of(monkeypatch, queue)
    queue.submit(4)
    queue.poll()
    queue.tags["u1"]["status"] = "failure"
    for i in range(N):  # a failed group has no rows
        del queue.tags[f"u1_{i}_0"]
    batch, metrics = buffer.sample(1, "train", 4)
    assert {key.split("_")[0] for key in batch.keys} == {"u0", "u2", "u3", "u4"}
    assert metrics["training/rollout_failure/evicted_samples"] == 1


class Engine(Queue):
    """An engine for `slots` groups at once, the others wait; a poll is a unit of time. `shares` are the probabilities
    of a useful group in each step, `hours` returns how long a group takes."""

    def __init__(self, shares: list[float], slots: int, hours: Callable[[], float]):
        super().__init__([], [])
        self.random, self.shares, self.slots, self.hours = random.Random(1), cycle(shares), slots, hours
        self.share, self.time, self.busy, self.started = next(self.shares), 0, [], 0

    def submit(self, n: int) -> None:
        while len(self.answers) < self.submitted + n:
            self.answers.append([1.0, float(self.random.random() > self.share), 1.0])
            self.delays.append(int(self.hours()))
        super().submit(n)

    def poll(self, *_) -> float:
        everything, served = self.waiting, list(self.waiting)[: self.slots]
        self.waiting = {uid: everything[uid] for uid in served}
        super().poll()
        self.busy.append(len(served))
        self.waiting |= {uid: hours for uid, hours in everything.items() if uid not in served}
        return 0.0


def generated_and_busy(monkeypatch, shares, batch_size, inflight, steps, slots=None) -> tuple[float, float]:
    """Return the prompts generated / the fewest that hold the batches, and the busy share of the slots until a step
    submits its last prompt."""
    durations = random.Random(2)
    queue = Engine(shares, slots or batch_size, lambda: 10 * durations.lognormvariate(0, 0.6))
    buffer, _ = buffer_of(monkeypatch, queue)
    buffer.train_batch_size, buffer.max_inflight_gen_batches = batch_size, inflight
    generated, used, busy, ends = 0, 0, [], []
    submit = queue.submit

    def submit_and_note(n):
        submit(n)
        ends.append(len(queue.busy))

    buffer.refill_fn = submit_and_note
    for step in range(steps):
        queue.share, queue.busy = next(queue.shares), []
        ends[:] = [0]
        submit(batch_size)
        batch, metrics = buffer.sample(step, "train", batch_size)
        generated += metrics["training/filter_groups/gen_batches"] * batch_size
        last = max(int(key.split("_")[0][1:]) for key in batch.keys)
        used, first = last + 1, used
        queue.tags.clear()
        outcomes = queue.answers[first : last + 1]
        assert sum(len(set(each)) > 1 for each in outcomes) == batch_size, "the first useful groups of the data"
        busy += queue.busy[: ends[-1]]
    return generated / used, sum(busy) / (len(busy) * queue.slots) if busy else 1.0


@pytest.mark.parametrize("inflight", [1, 2])
@pytest.mark.parametrize("batch_size", [8, 16, 64])
@pytest.mark.parametrize("shares", [[0.5], [0.3], [0.7, 0.6, 0.5, 0.4, 0.3, 0.4, 0.5, 0.6], [0.3, 0.7]])
def test_few_prompts_are_generated_in_vain_and_the_engine_is_busy(monkeypatch, shares, batch_size, inflight):
    """Upstream generates 1.3 to 1.6 times the fewest, and one-for-one replacement keeps a fifth to a half busy."""
    steps = 8 if batch_size == 64 else 32
    generated, busy = generated_and_busy(monkeypatch, shares, batch_size, inflight, steps)
    assert generated <= 1.15 and busy >= 0.75


@pytest.mark.parametrize("reward", [0.9, 0.1, 0.7])
def test_groups_of_equal_rewards_are_found_whatever_their_mean_is(monkeypatch, reward):
    """The standard deviation of many equal rewards is not 0 in floating point, by which upstream's buffer asks."""
    queue = Queue([[reward] * 10, [reward, reward, 0.0]], delays=[0])
    buffer, dropped = buffer_of(monkeypatch, queue)
    queue.submit(2)
    queue.poll()
    buffer._sync_metadata_from_transfer_queue()
    flat, counts = buffer._dapo_filtered_keys("train")
    assert flat == {"u0"} and counts == {reward: 1}


# ---- the prompts of a run, over steps and over a resumption ----

FILTERED = {"algorithm.filter_groups": {"enable": True, "metric": "acc", "max_inflight_gen_batches": 2}}


@pytest.fixture
def trainer(monkeypatch, tmp_path):
    """Make trainers whose data are problems 0, 1, 2, …, and whose checkpoints hold the number of the next one."""
    state = {}

    def fetch(self) -> dict:
        uids = np.array([f"uid of {next(self.numbers)}"], dtype=object)
        return get_tensordict({"uid": uids, "raw_prompt": np.array([[{"role": "user"}]], dtype=object)})

    def load(self):
        self.global_steps = 3
        self.numbers = count(state["next"])

    monkeypatch.setattr(PPOTrainer, "_fetch_one_gen_batch", fetch)
    monkeypatch.setattr(PPOTrainer, "_save_checkpoint", lambda self: state.update(next=next(self.numbers)))
    monkeypatch.setattr(PPOTrainer, "_load_checkpoint", load)

    def make(kind=ExploreTrainer, **values):
        keys = {"trainer.default_local_dir": str(tmp_path), "data.train_batch_size": 4, "data.gen_batch_size": 1}
        made = kind(config_of(keys | FILTERED | values))
        made.numbers, made.global_steps = count(), 3
        return made

    (tmp_path / "global_step_3").mkdir()
    return make


def asked(made, n: int) -> list[int]:
    batch = made._next_train_batch(n)
    batch["added by the submission"] = np.arange(n)
    return [int(uid.split()[-1]) for uid in batch["uid"]]


@pytest.mark.parametrize("kind", [ExploreTrainer, WatchedSyncTrainer])
def test_unused_prompts_are_asked_again_first_and_survive_a_resumption(trainer, kind):
    made = trainer(kind)
    assert asked(made, 4) == [0, 1, 2, 3] and asked(made, 2) == [4, 5]
    made.supply.end_step({"uid of 4", "uid of 5", "uid of 2"}, 0.25)
    assert asked(made, 4) == [2, 4, 5, 6]
    made.supply.end_step({"uid of 5", "uid of 6"}, 0.75)
    made._save_checkpoint()
    resumed = trainer(kind)
    resumed._load_checkpoint()
    assert asked(resumed, 1) == [5], "a step may end before all kept prompts are asked"
    resumed.supply.end_step({"uid of 5"}, 0.5)
    assert asked(resumed, 4) == [5, 6, 7, 8]
    assert resumed.supply.useful_share(0, 0, 4) == 0.75, "the largest of the last steps"


@pytest.mark.parametrize("kind", [ExploreTrainer, WatchedSyncTrainer])
def test_every_filtered_synchronous_run_has_the_buffer(trainer, kind):
    """DAPO's scripts, too, where upstream's buffer would put failed groups into the batch."""
    buffer = trainer(kind).replay_buffer
    assert isinstance(buffer, TreeBuffer) and buffer.max_inflight_gen_batches == 2 and not buffer.max_num_gen_batches
    unfiltered = trainer(kind, **{"algorithm.filter_groups": {"enable": False}})
    assert type(unfiltered.replay_buffer) is ReplayBuffer and asked(unfiltered, 2) == [0, 1]
