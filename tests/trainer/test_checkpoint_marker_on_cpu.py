"""A checkpoint cut off in mid-write is never taken for complete."""

from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from verl.trainer.checkpoint_marker import (
    MARKER,
    MERGED,
    TRACKER,
    MarkComplete,
    complete_steps,
    forget_marks_from,
    repair_tracker,
    saved_config,
    tracked_step,
)
from verl.utils.fault_reports import RunError


def trainer_of(mode: str = "sync", workers: int = 4, strategy: str = "megatron"):
    trainer = {"v1": {"trainer_mode": mode}, "nnodes": 1, "n_gpus_per_node": workers}
    actor = {"strategy": strategy, "checkpoint": {"save_contents": ["model", "hf_model"]}}
    return SimpleNamespace(config=OmegaConf.create({"trainer": trainer, "actor_rollout_ref": {"actor": actor}}))


def save(folder, step: int = 3, **trainer) -> None:
    MarkComplete().on_save(trainer_of(**trainer), global_step=step, checkpoint_dir=str(folder))


def checkpoint(run_dir, step, complete=True):
    folder = run_dir / f"global_step_{step}"
    (folder / "actor").mkdir(parents=True)
    if complete:
        save(folder, step)


@pytest.mark.parametrize("tracker", [None, "", "2", "11", "not a number"])
def test_resumes_from_the_last_complete_one(tmp_path, tracker):
    checkpoint(tmp_path, 9)
    checkpoint(tmp_path, 10)
    checkpoint(tmp_path, 11, complete=False)
    if tracker is not None:
        (tmp_path / TRACKER).write_text(tracker)
    assert "step 10" in repair_tracker(tmp_path)
    assert tracked_step(tmp_path) == 10


@pytest.mark.parametrize("has_marker", [True, False])
def test_a_good_tracker_and_that_of_a_run_without_markers_are_left_alone(tmp_path, has_marker):
    checkpoint(tmp_path, 9, has_marker)
    checkpoint(tmp_path, 10, has_marker)
    (tmp_path / TRACKER).write_text("10")
    assert repair_tracker(tmp_path) is None and tracked_step(tmp_path) == 10


def test_nothing_complete_starts_anew(tmp_path):
    (tmp_path / TRACKER).write_text("")
    assert "beginning" in repair_tracker(tmp_path)
    assert tracked_step(tmp_path) is None


def test_weights_removed_by_retention_do_not_count(tmp_path):
    checkpoint(tmp_path, 9)
    checkpoint(tmp_path, 10)
    (tmp_path / "global_step_9" / "actor").rmdir()
    assert complete_steps(tmp_path) == [10]


def test_steps_that_will_be_overwritten_lose_their_mark(tmp_path):
    for step in (5, 10, 15):
        checkpoint(tmp_path, step)
    forget_marks_from(tmp_path, 10)
    assert complete_steps(tmp_path) == [5]
    assert not (tmp_path / "global_step_15" / MARKER).exists()


def test_merged_shards_of_an_earlier_checkpoint_of_the_step_are_removed(tmp_path):
    """The evaluation would load them as if they were of this one."""
    checkpoint(tmp_path, 5)
    (tmp_path / "global_step_5" / MERGED).mkdir()
    save(tmp_path / "global_step_5", 5)
    assert not (tmp_path / "global_step_5" / MERGED).exists() and complete_steps(tmp_path) == [5]


def test_a_checkpoint_holds_the_config_that_made_it(tmp_path):
    trainer = trainer_of()
    trainer.config.copied = "${trainer.nnodes}"
    checkpoint(tmp_path, 5, complete=False)
    folder = tmp_path / "global_step_5"
    assert saved_config(folder) is None
    MarkComplete().on_save(trainer, global_step=5, checkpoint_dir=str(folder))
    assert saved_config(folder) == OmegaConf.to_container(trainer.config, resolve=True)


def test_asynchronous_saves_are_not_marked(tmp_path):
    (tmp_path / "global_step_3").mkdir()
    MarkComplete().on_save(trainer_of(), 3, str(tmp_path / "global_step_3"), async_save=True)
    assert complete_steps(tmp_path) == []


@pytest.mark.parametrize(("mode", "kept"), [("explore", False), ("explore_colocate_async", True)])
def test_prompts_under_way_are_those_of_the_run_that_saved_last(tmp_path, mode, kept):
    """An asynchronous run that resumes here must not train the prompts of an abandoned run again."""
    (tmp_path / "transfer_queue/rows").mkdir(parents=True)
    save(tmp_path, mode=mode)
    assert (tmp_path / MARKER).exists() and (tmp_path / "transfer_queue").exists() == kept


def shards(folder, size: int, ranks) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for rank in ranks:
        for kind in ("model", "optim", "extra_state"):
            (folder / f"{kind}_world_size_{size}_rank_{rank}.pt").touch()


def test_a_checkpoint_without_all_shards_is_not_marked(tmp_path):
    """Two nodes that do not share the folder: each has its own ranks' shards."""
    actor = tmp_path / "global_step_3/actor"
    actor.mkdir(parents=True)
    nobody_wrote = "actor lacks model_world_size_2_rank_0.pt, model_world_size_2_rank_1.pt, so"
    with pytest.raises(RunError, match=nobody_wrote):
        save(actor.parent, workers=2, strategy="fsdp2")
    shards(actor, 4, [0, 1])
    with pytest.raises(RunError, match="actor lacks extra_state_world_size_4_rank_2.pt, .* …, so that"):
        save(actor.parent)
    assert complete_steps(tmp_path) == []
    shards(actor, 4, [2, 3])
    save(actor.parent)
    assert complete_steps(tmp_path) == [3]


def test_shards_of_a_killed_run_with_other_workers_do_not_count(tmp_path):
    folder = tmp_path / "global_step_3"
    shards(folder / "actor", 4, [0])
    shards(folder / "actor", 2, [0, 1])
    shards(folder / "critic", 2, [0])
    with pytest.raises(RunError, match="critic lacks extra_state_world_size_2_rank_1.pt"):
        save(folder, workers=2)
    shards(folder / "critic", 2, [1])
    save(folder, workers=2)
    assert complete_steps(tmp_path) == [3]
