"""The trainers of the asynchronous schedules without Ray: prompts under way, trees, and what resumes."""

import json
from types import SimpleNamespace

import pytest
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, get_trainer_cls

from tests.trainer.ppo import toy_step
from tests.trainer.ppo.toy_step import ACTOR, ROLLOUT, MemoryQueue, config_of
from verl.trainer.ppo.v1.asynchronous_trainers import forget_rows_without_prompt, remove_old_rows
from verl.trainer.ppo.v1.batch_rows import ORDER, PROBLEM
from verl.trainer.ppo.v1.component import Component
from verl.trainer.ppo.v1.tree_buffer import AsyncTreeBuffer
from verl.utils import tensordict_utils as tu
from verl.workers.rollout.prompt_task import PROMPT_SETTINGS, STEP_SETTINGS, PromptSettings

MODES = ("explore_colocate_async", "explore_separate_async")
SEPARATE = {
    "data.train_batch_size": 4,
    f"{ACTOR}.ppo_mini_batch_size": 4,
    f"{ROLLOUT}.nnodes": 1,
    f"{ROLLOUT}.checkpoint_engine.backend": "cpu",
    "trainer.v1.separate_async.parameter_sync_step": 1,
}


class Queue(MemoryQueue):
    """A queue with the calls that upstream and our trainers make when a run resumes."""

    def __init__(self, monkeypatch):
        super().__init__(monkeypatch)
        monkeypatch.setattr("transfer_queue.kv_list", self.kv_list)
        monkeypatch.setattr("transfer_queue.kv_clear", self.kv_clear)

    def kv_list(self, partition_id=None):
        return {"train": dict(self.tags)}

    def kv_clear(self, keys, partition_id):
        for key in keys:
            self.rows.pop(key, None)
            self.tags.pop(key, None)


class Manager:
    """Stands for the rollout workers."""

    def __init__(self):
        self.sent, self.requests = [], []

    def generate_sequences(self, prompts: TensorDict) -> None:
        self.sent.append(prompts)

    def stop(self) -> None:
        self.requests.append("stop")


def trainer_of(mode: str = "explore_colocate_async", **values):
    made = get_trainer_cls(mode)(config_of(SEPARATE | {"trainer.v1.trainer_mode": mode} | values))
    made.global_steps, made.total_training_steps, made.agent_loop_manager = 5, 10, Manager()
    return made


@pytest.fixture
def queue(monkeypatch):
    return Queue(monkeypatch)


def prompts_of(*questions: str) -> TensorDict:
    batch = toy_step.prompts_of(questions, uid=[f"uid-{question}" for question in questions])
    tu.assign_non_tensor_data(batch, "global_steps", 5)
    return batch


@pytest.mark.parametrize("mode", MODES)
def test_prompts_keep_what_their_rows_must_know(mode, queue):
    made = trainer_of(mode)
    made._submit_batch_to_rollout(prompts_of("a", "b"))
    made._submit_batch_to_rollout(prompts_of("c"))
    kept = [(queue.rows[f"uid-{name}"][ORDER], queue.tags[f"uid-{name}"]["status"]) for name in "abc"]
    assert kept == [(0, "pending"), (1, "pending"), (2, "pending")]
    assert len({queue.rows[f"uid-{name}"][PROBLEM] for name in "abc"}) == 3


class Setting(Component):
    """A component that sends a setting with each batch, as LATR's thresholds and HATO's value model go."""

    def step_settings(self, trainer):
        return PromptSettings(tree=(trainer.global_steps * 10,))


def test_prompts_under_way_begin_again_with_the_settings_of_now(queue):
    made = trainer_of()
    made.components.append(Setting(made.config))
    made._submit_batch_to_rollout(prompts_of("a", "b", "c"))
    for name, status in (("a", "running"), ("b", "finished")):
        queue.tags[f"uid-{name}"]["status"] = status
    queue.add("uid-a_0_0", 1.0, [1, 1])  # half a group
    resumed = trainer_of()
    resumed.components.append(Setting(resumed.config))
    resumed.global_steps = 7
    assert resumed._reissue_inflight_prompts() == 2
    (sent,) = resumed.agent_loop_manager.sent
    assert sorted(sent["uid"]) == ["uid-a", "uid-c"] and sent["global_steps"] == 7
    assert sent[STEP_SETTINGS] == PromptSettings(tree=(70,))
    assert sorted(sent[ORDER]) == [0, 2] and [each.occurrence for each in sent[PROMPT_SETTINGS]] == [0, 0]
    assert "uid-a_0_0" not in queue.rows and queue.tags["uid-b"]["status"] == "finished"
    assert isinstance(resumed.agent_loop_manager, Manager), "only for these prompts"
    # the same problem, fresh in this step, gets other seeds
    resumed._submit_batch_to_rollout(prompts_of("a"))
    assert [each.occurrence for each in resumed.agent_loop_manager.sent[-1][PROMPT_SETTINGS]] == [1]


def test_rows_that_were_trained_before_the_checkpoint_are_forgotten(queue):
    """Upstream's checkpoint has them, without their prompt."""
    made = trainer_of()
    made._submit_batch_to_rollout(prompts_of("a"))
    queue.add("uid-a_0_0", 1.0, [1])
    queue.add("trained_0_0", 1.0, [1])
    queue.add("pad1_0_0", 1.0, [1], tag={"is_padding": True})
    forget_rows_without_prompt()
    assert sorted(queue.tags) == ["uid-a", "uid-a_0_0"]


def test_rows_are_kept_as_long_as_the_weights(tmp_path):
    for step, kept in ((2, "actor"), (4, "actor/model"), (6, "data"), (8, "data")):
        (tmp_path / f"global_step_{step}" / kept).mkdir(parents=True)
        (tmp_path / f"global_step_{step}/transfer_queue/rows").mkdir(parents=True)
    (tmp_path / "global_step_2/actor").rmdir()  # upstream's retention removes weights
    (tmp_path / "global_step_4_best/transfer_queue").mkdir(parents=True)  # a user's copy
    remove_old_rows(tmp_path, 6)
    assert sorted(rows.parent.name for rows in tmp_path.glob("*/transfer_queue")) == [
        f"global_step_{step}" for step in (4, "4_best", 6, 8)
    ]


def test_prompts_go_on_being_counted_after_a_resumption(queue, monkeypatch, tmp_path):
    monkeypatch.setattr(PPOTrainer, "_save_checkpoint", lambda self: None)
    monkeypatch.setattr(PPOTrainer, "_load_checkpoint", lambda self: setattr(self, "global_steps", 5))
    folder = {"trainer.default_local_dir": str(tmp_path)}
    made = trainer_of(**folder)
    made._submit_batch_to_rollout(prompts_of("a", "b"))
    made._save_checkpoint()
    resumed = trainer_of(**folder)
    resumed._load_checkpoint()
    resumed._submit_batch_to_rollout(prompts_of("c"))
    assert queue.rows["uid-c"][ORDER] == 2


@pytest.mark.parametrize("mode", MODES)
def test_unfinished_prompts_are_given_up_at_the_end(mode, monkeypatch):
    manager = Manager()
    monkeypatch.setattr(PPOTrainer, "fit", lambda self, manager: setattr(self, "agent_loop_manager", manager))
    trainer_of(mode).fit(manager)
    assert manager.requests == ["stop"]


def test_trees_are_kept_of_prompts_that_began_in_their_step(queue, tmp_path):
    """Prompts of step 4 (tree_freq=4) have trees, and are trained in two updates of step 5; prompts of 5 have none."""
    made = trainer_of(
        **{"trainer.tree_freq": 4, "trainer.tree_prompts": 2, "trainer.default_local_dir": str(tmp_path)},
        **{"algorithm.adv_estimator": "grpo", "algorithm.norm_adv_by_std_in_grpo": False},
    )
    made.tokenizer = SimpleNamespace(decode=str)
    for i, step in enumerate([4, 4, 5, 4]):
        for session in range(2):
            ids, tag = [0, 1 + session], {"global_steps": step}
            queue.add(f"g{i}_{session}_0", float(session), [1, 1], i, tag, segment_ids=ids)
    for names in (["g0", "g2"], ["g1", "g3"]):
        made._compute_advantage(queue.batch(*names), {})
    lines = (tmp_path / "trees/step_000005.jsonl").read_text().splitlines()
    assert [json.loads(line)["uid"] for line in lines] == ["g0", "g1"], "two of a step, not of an update"
    again = trainer_of(**{"trainer.tree_freq": 4})
    again.config, again.tokenizer = made.config, made.tokenizer
    again._compute_advantage(queue.batch("g3"), {})
    (line,) = (tmp_path / "trees/step_000005.jsonl").read_text().splitlines()
    assert json.loads(line)["uid"] == "g3", "a resumed run writes the step anew"


def test_prompts_of_a_step_are_those_of_all_its_updates(monkeypatch):
    def step(self, metrics, timing):
        metrics["tree/prompts"] = 2.0  # upstream's mean over updates of two prompts each
        keys = [f"g{i}_{session}_0" for i in range(4) for session in range(2)] + ["pad_0_0"]
        return KVBatchMeta(keys=keys, tags=[{}] * 8 + [{"is_padding": True}], partition_id="train")

    monkeypatch.setattr(PPOTrainer, "step", step)
    metrics = {}
    trainer_of("explore_separate_async").step(metrics, {})
    assert metrics == {"tree/prompts": 4, "actor/skipped_updates": 0}


HATO = {
    f"{ROLLOUT}.tree": "hato",
    "algorithm.filter_groups.enable": True,
    "algorithm.filter_groups.metric": "acc",
    "hato": {"exploration": {"temperature_decay": 0.0}},
}


def test_hatos_components_see_groups_before_they_are_dropped(queue):
    made = trainer_of(**HATO)
    buffer = made.replay_buffer
    assert isinstance(buffer, AsyncTreeBuffer) and buffer.refill_fn == made._add_prompts_to_generate
    seen, refilled = [], []
    made.components = [type("Component", (), {"on_drop": lambda self, rows: seen.append(sorted(rows.keys))})()]
    buffer.refill_fn, buffer.poll_interval = refilled.append, 0.0
    accuracies = {"flat": [1.0, 1.0], "alone": [1.0], "useful": [0.0, 1.0], "failed": []}
    for uid, of_rows in accuracies.items():
        status = "failure" if uid == "failed" else "finished"
        queue.tags[uid] = {"is_prompt": True, "status": status, "global_steps": 5}
        for session, accuracy in enumerate(of_rows):
            info = {"reward_extra_info": {"acc": accuracy}}
            queue.add(f"{uid}_{session}_0", accuracy, [1], extra_fields=info)
    batch, metrics = buffer.sample(5, "train", 1)
    assert sorted(batch.keys) == ["useful_0_0", "useful_1_0"] and refilled == [3]
    assert seen == [["alone_0_0", "flat_0_0", "flat_1_0"]]
    assert metrics["training/filter_groups/evicted_samples"] == 2
