"""Tests of what ends a run that cannot learn: failed rollouts, reported with their first cause, and skipped updates."""

import asyncio
import inspect
import math
from collections import defaultdict
from functools import partial, partialmethod
from types import SimpleNamespace

import pytest
import torch
from verl.protocol import DataProtoFuture
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from tests.trainer.ppo.toy_step import ACTOR, MemoryQueue, trainer_of
from verl.trainer.ppo.v1 import replay_buffer, watched_run
from verl.trainer.ppo.v1.tree_buffer import RolloutsFailed
from verl.trainer.ppo.v1.watched_run import NO_ROWS, PHASES
from verl.utils import transferqueue_utils
from verl.utils.fault_reports import RunError
from verl.workers.rollout.group_counts import GroupCounts

NAN = math.nan


class Manager:
    """The agent loop manager's counts; a test sets what the rollout's workers would have counted."""

    def __init__(self):
        self.counts = defaultdict(GroupCounts)

    def group_counts(self, partition: str, take: bool) -> GroupCounts:
        return self.counts.pop(partition, GroupCounts()) if take else self.counts[partition]

    def fail(self, groups: int, partition: str = "train", finished: int = 0) -> None:
        for i in range(groups):
            self.counts[partition].add(ValueError(f"engine error {i}"))
        self.counts[partition].finished += finished


@pytest.fixture
def made(monkeypatch):
    made = trainer_of({"data.train_batch_size": 4})
    made.agent_loop_manager = Manager()
    return made


def upstream(monkeypatch, name: str, then):
    """Let upstream's method of this name do something else."""
    monkeypatch.setattr(PPOTrainer, name, lambda self, *args, **kwargs: then(self))


def failing(error: BaseException, groups: int = 0, finished: int = 0):
    """A method that raises the error after so many groups have failed or finished."""

    def method(self, *_):
        if groups:
            self.agent_loop_manager.fail(groups, finished=finished)
        raise error

    return method


def test_a_step_whose_rollouts_all_failed_names_the_first_cause(made, monkeypatch):
    upstream(monkeypatch, "step", lambda self: None)
    made.agent_loop_manager.fail(9)  # failures of the step before
    made.step({}, {})
    upstream(monkeypatch, "step", failing(RuntimeError(f"Here {NO_ROWS}."), groups=4))
    with pytest.raises(RunError, match="step 1: all 4 prompt groups failed; the first: ValueError: engine error 0"):
        made.step({}, {})


def test_upstream_still_says_what_is_looked_for():
    assert NO_ROWS in inspect.getsource(replay_buffer)


@pytest.mark.parametrize("error", [SystemExit(0), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("name", ["_save_checkpoint", "_update_actor", "_setup"])
def test_an_exit_is_an_error_with_its_phase(monkeypatch, name, error):
    """Ray would take SystemExit(0) for an end on purpose, and KeyboardInterrupt for a cancelled call."""

    upstream(monkeypatch, name, failing(error))
    made = trainer_of({"data.train_batch_size": 4, "trainer.default_local_dir": "/nowhere"})
    method = getattr(made, name)
    with pytest.raises(Exception, match=type(error).__name__):
        method(None, {}) if name == "_update_actor" else method()


@pytest.mark.parametrize("error", [SystemExit(0), asyncio.CancelledError(), KeyboardInterrupt()], ids=repr)
def test_an_exit_of_the_loop_is_reported(made, monkeypatch, error):
    reports = []
    monkeypatch.setattr("verl.trainer.ppo.v1.watched_run.report_fault", reports.append)
    upstream(monkeypatch, "fit", failing(error))
    with pytest.raises(RunError, match=type(error).__name__):
        made.fit(None)
    assert len(reports) == 1 and type(error).__name__ in reports[0]


@pytest.mark.parametrize("finished", [0, 3])
def test_an_error_of_the_update_is_its_own(made, monkeypatch, finished):
    """An asynchronous schedule may have completed the batch before the step in which one group failed."""
    upstream(monkeypatch, "step", failing(KeyError("advantages"), groups=1, finished=finished))
    with pytest.raises(KeyError, match="advantages"):
        made.step({}, {})


def test_a_buffer_that_gives_up_is_told_the_first_cause(made, monkeypatch):
    error = RolloutsFailed("5 rollouts failed for a batch of 4; the log tells each one's error")
    upstream(monkeypatch, "step", failing(error, groups=5, finished=3))
    with pytest.raises(RunError, match="5 of 8 prompt groups failed; the first: ValueError: engine error 0"):
        made.step({}, {})


def test_refills_end_when_more_than_a_batch_has_failed_in_a_step(made, monkeypatch):
    submitted = []
    monkeypatch.setattr(PPOTrainer, "_add_prompts_to_generate", lambda self, n: submitted.append(n))
    made.agent_loop_manager.fail(4, finished=1)
    made._add_prompts_to_generate(3)
    made.agent_loop_manager.fail(1)
    with pytest.raises(RunError, match="5 of 6 prompt groups failed; the first: ValueError: engine error 0"):
        made._add_prompts_to_generate(1)
    assert submitted == [3]


def test_a_step_ends_with_the_fault_that_another_process_reported(made, monkeypatch):
    """The step ends before its checkpoint, also if the run would end before the driver reads the report."""
    upstream(monkeypatch, "step", lambda self: None)
    monkeypatch.setattr(watched_run, "reported_faults", lambda: ["the reward function's acc is 'yes'"])
    with pytest.raises(RunError, match="the reward function's acc is 'yes'"):
        made.step({}, {})


def test_a_validation_says_how_many_prompts_failed(made, monkeypatch, capsys):
    upstream(monkeypatch, "_validate", lambda self: self.agent_loop_manager.fail(2, "val", finished=6) or {"acc": 1.0})
    made.global_steps = 3
    for _ in range(2):
        assert made._validate() == {"acc": 1.0, "val-aux/failed_prompts": 2}
    failed = "2 of 8 prompt groups failed; the first: ValueError: engine error 0"
    assert capsys.readouterr().err == f"warning: step 3, validation: {failed}\n"
    upstream(monkeypatch, "_validate", lambda self: self.agent_loop_manager.fail(8, "val") or {})
    with pytest.raises(RunError, match="validation: all 8 prompt groups failed; the first: ValueError"):
        made._validate()
    upstream(monkeypatch, "_validate", lambda self: {"acc": 1.0})
    assert made._validate() == {"acc": 1.0}


class Workers:
    """Workers whose updates have these norms of gradients, a list for each step."""

    workers: list = []

    def __init__(self, *grad_norms):
        self.grad_norms = list(grad_norms)
        self.fetched: dict[str, set[str]] = {}

    def _fetch(self, method: str, batch):
        self.fetched[method] = set(transferqueue_utils.kv_batch_meta2batch_meta(batch).field_schema)
        return {"metrics": {"grad_norm": self.grad_norms.pop(0)}} if self.grad_norms else batch

    compute_log_prob = partialmethod(_fetch, "compute_log_prob")
    compute_ref_log_prob = partialmethod(_fetch, "compute_ref_log_prob")
    infer_batch = partialmethod(_fetch, "infer_batch")
    update_actor = partialmethod(_fetch, "update_actor")

    def train_mini_batch(self, batch):
        """Upstream's call does not wait."""
        later = DataProtoFuture(collect_fn=None, futures=[])
        later.get = partial(dict, self._fetch("train_mini_batch", batch))
        return later


def set_up(made, monkeypatch, use_critic=False, use_reference_policy=False, **workers) -> None:
    """Let upstream set up these workers."""
    made.use_critic, made.use_reference_policy, made.ref_in_actor = use_critic, use_reference_policy, False
    upstream(monkeypatch, "_setup", lambda self: vars(self).update(workers))
    made._setup()


def trained(made, monkeypatch, batch, *grad_norms) -> list[int]:
    """The number of skipped updates of each step."""
    set_up(made, monkeypatch, actor_rollout_wg=Workers(*grad_norms))
    upstream(monkeypatch, "step", lambda self: self.actor_rollout_wg.update_actor(batch))
    counts = []
    for made.global_steps in range(1, len(grad_norms) + 1):
        made.step(metrics := {}, {})
        counts.append(metrics["actor/skipped_updates"])
    return counts


@pytest.fixture
def batch(monkeypatch):
    queue = MemoryQueue(monkeypatch)
    for session in range(2):
        queue.add(f"p_{session}_0", 1.0, [1, 1], advantages=[0.5, 0.5])
    return queue


def test_skipped_updates_are_counted_and_three_in_a_row_end_the_run(made, monkeypatch, batch):
    assert trained(made, monkeypatch, batch.batch(), [1.0, NAN], [NAN, 2.0], [math.inf, NAN], [1.0]) == [1, 1, 2, 0]
    batch.rows["p_1_0"]["old_log_probs"] = torch.tensor([0.0, NAN])
    batch.rows["p_0_0"]["advantages"] = torch.tensor([NAN, 0.0])
    expected = "step 2: the last 3 updates of the actor were skipped, because .* are not finite: so are old_log_probs"
    with pytest.raises(RunError, match=expected):
        trained(made, monkeypatch, batch.batch(), [NAN, NAN], [NAN])


@pytest.mark.parametrize("value", [NAN, math.inf, -math.inf])
@pytest.mark.parametrize("column", ["rm_scores", "rollout_log_probs", "old_log_probs", "ref_log_prob", "values"])
def test_no_update_learns_from_what_is_not_finite(made, monkeypatch, batch, column, value):
    """Even if the gradients would be 0, as with the rewards of an engine whose weights are NaN."""
    made.use_reference_policy = made.use_critic = True
    monkeypatch.setattr(PPOTrainerSync, "_compute_advantage", lambda self, batch, metrics: batch)
    for row in batch.rows.values():
        row |= dict.fromkeys(("advantages", "returns", column), torch.zeros(2))
    made._compute_advantage(batch.batch(), {})
    batch.rows["p_1_0"][column] = torch.tensor([0.0, value])
    with pytest.raises(RunError, match=f"step 1: .* NaN or infinity: {column} of 1 of 2 responses, computed by the"):
        made._compute_advantage(batch.batch(), {})


def test_skipped_updates_of_a_critic_end_the_run_too(made, monkeypatch, batch):
    critic = Workers([NAN, NAN], [NAN])
    set_up(made, monkeypatch, use_critic=True, actor_rollout_wg=Workers(), critic_wg=critic)
    made.critic_wg.train_mini_batch(batch.batch())
    with pytest.raises(RunError, match="the last 3 updates of the critic were skipped"):
        made.critic_wg.train_mini_batch(batch.batch())


def test_the_workers_fetch_tensors_and_pictures_only(made, monkeypatch, batch):
    """Each time those that the batch has then, and later calls of others fetch everything again."""
    workers = {name: Workers() for name in ("actor_rollout_wg", "ref_policy_wg", "critic_wg")}
    set_up(made, monkeypatch, use_critic=True, use_reference_policy=True, **workers)
    for row in batch.rows.values():
        row |= {"multi_modal_inputs": {}, "raw_prompt": [{"role": "user"}], "num_turns": 2}
        del row["advantages"]
    rows, everything = batch.batch(), set(batch.rows["p_0_0"])
    tensors = {"prompts", "responses", "response_mask", "loss_mask", "rm_scores", "old_log_probs"}
    made.actor_rollout_wg.compute_log_prob(rows)
    made.ref_policy_wg.compute_ref_log_prob(rows)
    made.critic_wg.infer_batch(rows)
    for row in batch.rows.values():
        row["advantages"] = torch.ones(2)
    made.actor_rollout_wg.grad_norms, made.critic_wg.grad_norms = [[1.0]], [[1.0]]
    made.critic_wg.train_mini_batch(rows)
    made.actor_rollout_wg.update_actor(rows)
    seen = made.actor_rollout_wg.fetched | made.ref_policy_wg.fetched | made.critic_wg.fetched
    before, after = tensors | {"multi_modal_inputs"}, tensors | {"multi_modal_inputs", "advantages"}
    expected = dict.fromkeys(["compute_log_prob", "compute_ref_log_prob", "infer_batch"], before)
    assert seen == expected | dict.fromkeys(["train_mini_batch", "update_actor"], after)
    assert set(transferqueue_utils.kv_batch_meta2batch_meta(rows).field_schema) == everything | {"advantages"}


def test_a_loss_that_makes_nan_of_finite_numbers_is_named(made, monkeypatch, batch):
    with pytest.raises(RunError, match="so that it is the loss itself"):
        trained(made, monkeypatch, batch.batch(), [NAN] * 3)


def test_a_float16_loss_scale_may_skip_more(monkeypatch, batch):
    made = trainer_of({f"{ACTOR}.fsdp_config.dtype": "float16"})
    assert trained(made, monkeypatch, batch.batch(), [math.inf] * 15, [1.0]) == [15, 0]


def test_a_run_that_skipped_all_updates_does_not_end_well(made, monkeypatch, batch):
    upstream(monkeypatch, "fit", lambda self: trained(self, monkeypatch, batch.batch(), [NAN, NAN]))
    with pytest.raises(RunError, match="all 2 updates of this run were skipped, .* nothing was learnt"):
        made.fit(made.agent_loop_manager)


def test_a_run_whose_gradients_are_all_0_does_not_end_well(made, monkeypatch, batch):
    """Short runs may: a trial of some steps may have no right response."""
    for norms, learnt in ([0.0] * 9, True), ([0.0] * 9 + [NAN], False), ([0.0] * 9 + [0.1], True):
        made.updates = made.idle_updates = made.skipped_updates = 0
        upstream(monkeypatch, "fit", lambda self, norms=norms: trained(self, monkeypatch, batch.batch(), norms))
        if learnt:
            made.fit(made.agent_loop_manager)
            continue
        with pytest.raises(RunError, match="all 10 updates of this run had gradients of 0: nothing was learnt"):
            made.fit(made.agent_loop_manager)


def rewarded(queue, *rewards: float) -> None:
    for i, reward in enumerate(rewards):
        queue.add(f"p_{i}_0", reward, [1], prompts=[3], responses=[4], advantages=[0.0])


def warned(made, queue, capsys) -> str:
    """Return what the run prints in four steps; the metric counts their batches with equal rewards."""
    for step in range(4):
        made._compute_advantage(queue.batch(), metrics := {})
        assert metrics["training/batches_with_equal_rewards"] == step + 1
    return capsys.readouterr().err


@pytest.fixture
def queue(monkeypatch):
    monkeypatch.setattr(PPOTrainerSync, "_compute_advantage", lambda self, batch, metrics: batch)
    return MemoryQueue(monkeypatch)


def test_equal_rewards_from_the_start_are_warned_of_once(made, queue, capsys):
    rewarded(queue, -1.0, -1.0)
    text = warned(made, queue, capsys)
    assert text.count("warning: step 1: all rewards of the first 3 batches are equal, the last are -1: compare") == 1


def test_rewards_that_have_varied_are_not_warned_of(made, queue, capsys):
    rewarded(queue, 1.0, 0.0)
    made._compute_advantage(queue.batch(), metrics := {})
    assert metrics["training/batches_with_equal_rewards"] == 0
    queue.rows["p_0_0"]["rm_scores"][-1] = 0.0
    assert not warned(made, queue, capsys)


@pytest.mark.parametrize("exit_code", [0, 1])
def test_a_tracker_that_cannot_be_closed_changes_nothing(made, caplog, exit_code):
    def finish(code):
        raise OSError(f"no server for {code}")

    made.logger = SimpleNamespace(finish=finish)
    made._close_trackers(exit_code)
    assert f"a tracker of trainer.logger could not be closed: OSError: no server for {exit_code}" in caplog.text


@pytest.mark.parametrize("step", [0, 9])
def test_a_checkpoint_that_cannot_be_loaded_is_named(made, monkeypatch, tmp_path, step):
    """An error before a checkpoint is chosen is its own."""

    def load(self):
        self.global_steps = step
        raise RuntimeError("PytorchStreamReader failed reading zip archive")

    upstream(monkeypatch, "_load_checkpoint", load)
    made.config.trainer.update({"default_local_dir": str(tmp_path), "save_freq": -1})
    message = f"^{tmp_path}/global_step_9 cannot be resumed from: RuntimeError: Pytorch.* would fail again"
    with pytest.raises(RuntimeError, match=message if step else "^PytorchStreamReader"):
        made._load_checkpoint()


def test_an_error_names_the_phase_in_which_it_was_raised(made, monkeypatch):
    """The innermost phase that it left, and its own message, not that of what failed because of it."""

    monkeypatch.setattr(PPOTrainerSync, "_update_actor", failing(ValueError("no such tensor")))
    upstream(monkeypatch, "step", lambda self: self._update_actor("batch", {}))
    upstream(monkeypatch, "fit", lambda self: self.step({}, {}))
    with pytest.raises(RunError, match="^update of the actor .step 1.: ValueError: no such tensor$"):
        made.fit(made.agent_loop_manager)


def test_upstreams_trainer_has_every_phase():
    assert [name for name in PHASES if not callable(getattr(PPOTrainerSync, name, None))] == []
