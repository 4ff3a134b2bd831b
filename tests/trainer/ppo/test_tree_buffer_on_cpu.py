"""Groups that tell nothing are replaced one by one; upstream's buffer on a queue in memory."""

import pytest
from tensordict import NonTensorData, NonTensorStack, TensorDict

from verl.trainer.ppo.v1 import replay_buffer
from verl.trainer.ppo.v1.tree_buffer import TreeBuffer

N = 3


class Queue:
    """Prompts are answered `delay` polls after they were submitted, prompt i with the outcomes `answers[i]`."""

    def __init__(self, answers: list[list[float]], delays: list[int]):
        self.answers, self.delays = answers, delays
        self.tags: dict[str, dict] = {}
        self.outcomes: dict[str, float] = {}
        self.waiting: dict[str, int] = {}
        self.submitted = 0

    def submit(self, n: int) -> None:
        for _ in range(n):
            uid = f"u{self.submitted}"
            self.tags[uid] = {"is_prompt": True, "status": "pending", "global_steps": 1}
            self.waiting[uid] = self.delays[self.submitted % len(self.delays)]
            self.submitted += 1

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


def buffer_of(monkeypatch, queue: Queue, max_num_gen_batches: int) -> tuple[TreeBuffer, list[tuple[str, dict]]]:
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
    buffer, dropped = buffer_of(monkeypatch, queue, max_num_gen_batches=0)
    queue.submit(4)
    batch, metrics = buffer.sample(1, "train", 4)
    assert {key.split("_")[0] for key in batch.keys} == {"u0", "u3", "u5", "u7"} and len(batch.keys) == 4 * N
    assert queue.submitted == 8, "one for each dropped one, none in vain"
    assert sorted(key for key, _ in dropped) == sorted(f"u{i}_{j}_0" for i in (1, 2, 4, 6) for j in range(N))
    assert all(tag == {"status": "success"} for _, tag in dropped)
    assert metrics["training/filter_groups/evicted_samples"] == 4
    assert metrics["training/filter_groups/gen_batches"] == 2
    assert not any(tag.get("is_prompt") for tag in queue.tags.values())


def test_a_single_trajectory_says_nothing(monkeypatch):
    queue = Queue(answers("vsvsvvv"), [0])
    buffer, dropped = buffer_of(monkeypatch, queue, max_num_gen_batches=0)
    queue.submit(4)
    batch, metrics = buffer.sample(1, "train", 4)
    assert {key.split("_")[0] for key in batch.keys} == {"u0", "u2", "u4", "u5"}
    assert [key for key, _ in dropped] == ["u1_0_0", "u3_0_0"]
    assert metrics["training/filter_groups/evicted_samples"] == 2


def test_the_bound_ends_with_advice(monkeypatch):
    queue = Queue(answers("vwww" + "w" * 20), [0])
    buffer, _ = buffer_of(monkeypatch, queue, max_num_gen_batches=2)
    queue.submit(4)
    with pytest.raises(RuntimeError, match="of 7 prompts only 1 gave .*max_num_gen_batches=2 .*: raise it"):
        buffer.sample(1, "train", 4)
    assert queue.submitted == 7, "not more than 8"


def test_exactly_at_the_bound_is_fine(monkeypatch):
    queue = Queue(answers("vvvwwwwv"), [1])
    buffer, _ = buffer_of(monkeypatch, queue, max_num_gen_batches=2)
    queue.submit(4)
    batch, metrics = buffer.sample(1, "train", 4)
    assert len(batch.keys) == 4 * N and metrics["training/filter_groups/gen_batches"] == 2


def test_a_step_in_which_every_group_failed_says_so(monkeypatch):
    queue = Queue([], [0])
    buffer, _ = buffer_of(monkeypatch, queue, max_num_gen_batches=0)

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
    buffer, _ = buffer_of(monkeypatch, queue, max_num_gen_batches=0)
    queue.submit(4)
    queue.poll()
    queue.tags["u1"]["status"] = "failure"
    for i in range(N):  # a failed group has no rows
        del queue.tags[f"u1_{i}_0"]
    batch, _ = buffer.sample(1, "train", 4)
    assert {key.split("_")[0] for key in batch.keys} == {"u0", "u2", "u3", "u4"}


@pytest.mark.parametrize("reward", [0.9, 0.1, 0.7])
def test_groups_of_equal_rewards_are_found_whatever_their_mean_is(monkeypatch, reward):
    """The standard deviation of many equal rewards is not 0 in floating point, by which upstream's buffer asks."""
    queue = Queue([[reward] * 10, [reward, reward, 0.0]], delays=[0])
    buffer, dropped = buffer_of(monkeypatch, queue, 0)
    queue.submit(2)
    queue.poll()
    buffer._sync_metadata_from_transfer_queue()
    flat, counts = buffer._dapo_filtered_keys("train")
    assert flat == {"u0"} and counts == {reward: 1}
