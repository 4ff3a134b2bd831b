"""Schedules as users name them: what they settle, what is refused with them, and that recipes have the choice."""

import inspect

import pytest
from omegaconf import OmegaConf

from tests import configs
from verl.trainer.checks.parts import check_parts, check_transport, check_typed_sections
from verl.trainer.checks.resources.cluster import check_ray_resources, needed_ray_cpus
from verl.trainer.checks.run_plan import describe_plan
from verl.trainer.ppo.v1 import trainer_separate_async
from verl.workers.config.schedule import EXPLORE_TRAINERS, rollout_workers, schedule_of, settle_schedule

COLOCATE, SEPARATE = "schedule=colocate_async", "schedule=separate_async"


def composed(*overrides: str, recipe: str = "common", name: str = "explore", hardware: str = "cpu"):
    config = configs.composed(name, f"hardware={hardware}", *overrides, recipe=recipe)
    OmegaConf.set_struct(config, False)
    settle_schedule(config)
    return config


@pytest.mark.parametrize("schedule", ["sync", "colocate_async", "separate_async"])
def test_the_config_chooses_the_trainer(schedule):
    config = composed(f"schedule={schedule}")
    assert schedule_of(config) == schedule and config.trainer.v1.trainer_mode in EXPLORE_TRAINERS
    check_parts(config)
    check_typed_sections(config)


# recipe/common has upstream's own trainer, without components; run_explore.sh has the choice for GRPO and DAPO
TRAINERS = sorted((path.parts[-3], path.stem) for path in configs.RECIPES.glob("*/config/*_trainer.yaml"))
TRAINERS = [(recipe, name) for recipe, name in TRAINERS if recipe != "common"]


@pytest.mark.parametrize(("recipe", "name"), TRAINERS)
@pytest.mark.parametrize("schedule", [COLOCATE, SEPARATE])
def test_every_recipe_has_the_choice(recipe, name, schedule):
    # HATO's configs set these keys, which these schedules refuse
    sync = ["hato.exploration.temperature_decay=0", "algorithm.filter_groups.max_num_gen_batches=0"]
    others = sync if recipe == "hato" else []
    for hardware in ("gpu",) if "math" in name else ("cpu", "gpu"):
        check_parts(composed(schedule, *others, recipe=recipe, name=name, hardware=hardware))


def test_separate_servers_on_cpus_are_settled(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = composed(SEPARATE, "data.train_batch_size=12", "actor_rollout_ref.actor.ppo_mini_batch_size=4")
    assert config.trainer.v1.separate_async.parameter_sync_step == 3
    engine = config.actor_rollout_ref.rollout.checkpoint_engine
    assert engine.backend == "cpu" and engine.custom_backend_module.endswith("cpu_checkpoint_engine")
    assert config.algorithm.rollout_correction.rollout_is == "token", "its responses are of an older policy"
    assert rollout_workers(config) == 1 and config.ray_kwargs.ray_init.num_gpus == 2
    assert needed_ray_cpus(config) == 1 + 1 + 3 + 2 + 1
    check_ray_resources(config)


def test_two_nodes_with_gpus(tmp_path):
    config = composed(
        SEPARATE,
        "trainer.nnodes=1",
        "trainer.n_gpus_per_node=8",
        f"actor_rollout_ref.model.path={tmp_path}",
        hardware="gpu",
    )
    assert rollout_workers(config) == 8 and config.actor_rollout_ref.rollout.checkpoint_engine.backend == "nccl"
    OmegaConf.resolve(config.data)
    plan = describe_plan(config)
    assert "1 node(s) x 8 cuda = 8, trainer fsdp2, 8 cuda of the rollout's own, 8 replica(s) of 1" in plan
    assert "schedule=separate_async" in plan


def test_nccl_needs_cupy_where_a_gpu_is(monkeypatch):
    config = composed(SEPARATE, hardware="gpu")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check_transport(config, cuda_is_here=False)
    check_transport(composed("schedule=colocate_async", hardware="gpu"), cuda_is_here=True)
    with pytest.raises(ValueError, match="backend=nccl with schedule=separate_async, and the package cupy is not"):
        check_transport(config, cuda_is_here=True)


def test_nothing_is_settled_for_the_other_schedules():
    assert composed("schedule=sync").actor_rollout_ref.rollout.group_timeout == 3600
    for schedule in (COLOCATE, SEPARATE):  # where a prompt's own limit would count pauses
        assert composed(schedule).actor_rollout_ref.rollout.group_timeout is None
    for schedule in ("schedule=sync", COLOCATE):
        config = composed(schedule)
        assert rollout_workers(config) == 0 and config.ray_kwargs.ray_init.num_gpus == 1
        assert config.actor_rollout_ref.rollout.checkpoint_engine.backend == "naive"
        assert config.trainer.v1.separate_async.parameter_sync_step == 4  # upstream's


def test_why_the_trainers_gpus_must_hold_servers():
    """`Logger.info` takes no `flush`: when this is gone, so can be the refusal of hybrid_engine=false."""
    source = inspect.getsource(trainer_separate_async.PPOTrainerSeparateAsync._setup)
    assert "flush=True" in source and "logger.info(" in source
