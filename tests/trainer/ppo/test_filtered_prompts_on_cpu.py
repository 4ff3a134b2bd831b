"""Which prompts a run asks for that drops groups, over steps and over a resumption."""

from itertools import count

import numpy as np
import pytest
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils.tensordict_utils import get_tensordict

from tests.trainer.ppo.toy_step import config_of
from verl.trainer.ppo.v1.explore_trainer import ExploreTrainer
from verl.trainer.ppo.v1.tree_buffer import TreeBuffer
from verl.trainer.ppo.v1.watched_run import WatchedSyncTrainer

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
