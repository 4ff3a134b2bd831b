"""Schedules as users name them: what they settle, what is refused with them, and that recipes have the choice."""

import inspect

import pytest
from omegaconf import OmegaConf

from tests import configs
from verl.trainer.checks.parts import check_parts, check_typed_sections
from verl.trainer.checks.resources.cluster import check_ray_resources, needed_ray_cpus
from verl.trainer.checks.run_plan import describe_plan, describe_schedule
from verl.trainer.checks.schedule import check_transport
from verl.trainer.ppo.v1 import trainer_separate_async
from verl.utils.parts import computed_fields
from verl.workers.config.schedule import EXPLORE_TRAINERS, rollout_workers, schedule_of, settle_schedule

COLOCATE, SEPARATE = "schedule=colocate_async", "schedule=separate_async"
ENGINE = "actor_rollout_ref.rollout.checkpoint_engine"
SAMPLER = "trainer.v1.sampler.max_off_policy"


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
    assert describe_schedule(config).startswith(schedule)


# recipe/common has upstream's own trainer, without components; run_explore.sh has the choice for GRPO and DAPO
TRAINERS = sorted((path.parts[-3], path.stem) for path in configs.RECIPES.glob("*/config/*_trainer.yaml"))
TRAINERS = [(recipe, name) for recipe, name in TRAINERS if recipe != "common"]


@pytest.mark.parametrize(("recipe", "name"), TRAINERS)
@pytest.mark.parametrize("schedule", [COLOCATE, SEPARATE])
def test_every_recipe_has_the_choice(recipe, name, schedule):
    # what HATO's configs have and these schedules refuse
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
    config.ray_kwargs.ray_init.num_gpus = 1
    with pytest.raises(ValueError, match="num_gpus=1 is less than trainer.n_gpus_per_node=1 . 1 of actor_rollout_ref"):
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
    assert "separate_async, 1 batch(es) ahead, groups of at most 8 steps (drop)" in plan


def test_nccl_needs_cupy_where_a_gpu_is(monkeypatch):
    config = composed(SEPARATE, hardware="gpu")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check_transport(config, cuda_is_here=False)
    check_transport(composed("schedule=colocate_async", hardware="gpu"), cuda_is_here=True)
    with pytest.raises(ValueError, match="backend=nccl with schedule=separate_async, and the package cupy is not"):
        check_transport(config, cuda_is_here=True)


def test_nothing_is_settled_for_the_other_schedules():
    for schedule in ("schedule=sync", COLOCATE):
        config = composed(schedule)
        assert rollout_workers(config) == 0 and config.ray_kwargs.ray_init.num_gpus == 1
        assert config.actor_rollout_ref.rollout.checkpoint_engine.backend == "naive"
        assert config.trainer.v1.separate_async.parameter_sync_step == 4  # upstream's


HATO = ["tree=hato", "hato.exploration.temperature_decay=0"]
BOUND = ["algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=acc"]
BOUND += ["algorithm.filter_groups.max_num_gen_batches=3"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([COLOCATE, *HATO, "hato.meta_learning.enable=true"], "hato.meta_learning.enable=true with schedule=colocate"),
        ([SEPARATE, "tree=hato"], "hato.exploration.temperature_decay=0.1 with schedule=separate_async"),
        ([COLOCATE, *BOUND], "algorithm.filter_groups.max_num_gen_batches=3 with schedule=colocate_async"),
        ([SEPARATE, "actor_rollout_ref.hybrid_engine=false"], "actor_rollout_ref.hybrid_engine=false with schedule="),
        ([COLOCATE, "actor_rollout_ref.hybrid_engine=false"], "actor_rollout_ref.hybrid_engine=false with schedule="),
        ([COLOCATE, f"{SAMPLER}_threshold=0"], f"{SAMPLER}_threshold=0: expected null or a whole number from 1"),
        ([SEPARATE, f"{SAMPLER}_threshold=2.5"], f"{SAMPLER}_threshold=2.5: expected null or a whole number from 1"),
        ([COLOCATE, f"{SAMPLER}_strategy=dorp"], f"{SAMPLER}_strategy=dorp: expected drop or wait"),
        *(
            (
                [COLOCATE, f"trainer.v1.colocate_async.num_warmup_batches={ahead}"],
                f"trainer.v1.colocate_async.num_warmup_batches={ahead} with {SAMPLER}_threshold=8",
            )
            for ahead in (8, 7.5)
        ),
        *(
            (
                [COLOCATE, f"trainer.v1.colocate_async.num_warmup_batches={ahead}"],
                "num_warmup_batches=" + ("None" if ahead == "null" else ahead) + ": expected a number from 0",
            )
            for ahead in ("null", "-1", "two")
        ),
        (
            [SEPARATE, "trainer.v1.separate_async.parameter_sync_step=2"],
            "data.train_batch_size=16 with schedule=separate_async: expected trainer.v1.separate_async.paramet",
        ),
        ([SEPARATE, "actor_rollout_ref.rollout.nnodes=0"], "actor_rollout_ref.rollout.nnodes=0 with schedule="),
        (
            [SEPARATE, "actor_rollout_ref.rollout.tensor_model_parallel_size=2"],
            "rollout.nnodes x n_gpus_per_node = 1 with schedule=separate_async: expected a multiple of the 2 GPUs",
        ),
        ([SEPARATE, f"{ENGINE}.backend=naive"], f"{ENGINE}.backend=naive with schedule=separate_async"),
        (
            [SEPARATE, f"{ENGINE}.backend=nccl"],
            f"{ENGINE}.backend=nccl with schedule=separate_async and trainer.device",
        ),
        (
            [SEPARATE, "reward.reward_model.enable=true", "reward.reward_model.enable_resource_pool=false"],
            "reward.reward_model.enable_resource_pool=false with schedule=separate_async",
        ),
    ],
)
def test_what_cannot_go_with_a_schedule_is_named(overrides, message):
    with pytest.raises(ValueError) as error:
        check_parts(composed(*overrides))
    assert message in str(error.value)


@pytest.mark.parametrize("schedule", ["schedule=sync", COLOCATE])
@pytest.mark.parametrize(
    ("overrides", "mechanism"),
    [
        (["loss=hapo"], "actor.policy_loss.loss_mode=hapo"),
        (["sampler=tempered"], "sampler=tempered"),
        (["loss=aepo"], "actor.policy_loss.loss_mode=aepo"),
    ],
)
def test_losses_of_old_entropies_need_the_pass_that_computes_them(schedule, overrides, mechanism):
    config = composed(schedule, *overrides, "algorithm.rollout_correction.bypass_mode=true")
    assert mechanism in computed_fields(config).values()
    with pytest.raises(ValueError, match=f"bypass_mode=true skips .* which {mechanism} needs"):
        check_parts(config)
    check_parts(composed(schedule, "algorithm.rollout_correction.bypass_mode=true"))


def test_bounds_of_age_that_work():
    own = "trainer.v1.sampler.custom_sampler.path=own.py"
    for overrides in (
        [f"{SAMPLER}_threshold=null"],
        [f"{SAMPLER}_strategy=wait", f"{SAMPLER}_threshold=1"],
        [f"{SAMPLER}_threshold=1", own],
    ):
        check_parts(composed(COLOCATE, "trainer.v1.colocate_async.num_warmup_batches=4", *overrides))
    check_parts(composed(COLOCATE, "trainer.v1.colocate_async.num_warmup_batches=6.5"))


@pytest.mark.parametrize("schedule", [COLOCATE, SEPARATE])
def test_a_prompts_own_limit_counts_pauses_too(schedule):
    key = "actor_rollout_ref.rollout.group_timeout"
    assert composed(schedule).actor_rollout_ref.rollout.group_timeout is None
    assert composed("schedule=sync").actor_rollout_ref.rollout.group_timeout == 3600
    with pytest.raises(ValueError, match=f"{key}=60 with {schedule}: .* trainer.progress_timeout"):
        check_parts(composed(schedule, f"{key}=60"))
    check_parts(composed("schedule=sync", f"{key}=60"))


@pytest.mark.parametrize("key", ["trainer.progress_timeout", "actor_rollout_ref.rollout.group_timeout"])
def test_no_limit_is_null(key):
    check_parts(composed("schedule=sync", f"{key}=null"))
    with pytest.raises(ValueError, match=f"{key}=-1: expected seconds above 0, or null"):
        check_parts(composed("schedule=sync", f"{key}=-1"))


def test_a_correction_needs_the_probabilities_that_the_rollout_had():
    without = "actor_rollout_ref.rollout.calculate_log_probs=false"
    no_tree, no_weights = "actor_rollout_ref.rollout.tree=null", "algorithm.rollout_correction.rollout_is=null"
    for schedule in (COLOCATE, SEPARATE, "schedule=sync"):
        for kind in ("is=token", "rs=token_k1"):
            correction = f"algorithm.rollout_correction.rollout_{kind}"
            overrides = [schedule, without, *([] if kind.startswith("is") else [no_weights]), correction]
            with pytest.raises(ValueError, match=f"rollout_{kind} needs .*calculate_log_probs=true"):
                check_parts(composed(*overrides, no_tree))
            check_parts(composed(*overrides))
    check_parts(composed(SEPARATE, without, no_tree, no_weights))


@pytest.mark.parametrize("correction", ["rollout_is=token", "rollout_rs=token_k1", "bypass_mode=true"])
def test_a_correction_needs_probabilities_at_the_temperature_of_the_training(correction):
    """LATR's greedy tokens come with those at temperature 1; sampled ones with those that they were sampled from."""
    correction = f"algorithm.rollout_correction.{correction}"
    cooler = "actor_rollout_ref.rollout.temperature=0.7"
    with pytest.raises(ValueError, match="rollout_correction.* with tree=latr and .*temperature=0.7"):
        check_parts(composed("tree=latr", correction, cooler))
    check_parts(composed("tree=latr", correction))
    check_parts(composed("tree=arpo", correction, cooler))
    check_parts(composed("tree=latr", cooler))


@pytest.mark.parametrize("schedule", [SEPARATE, "schedule=sync"])
@pytest.mark.parametrize("truncation", ["top_p=0.9", "top_k=20"])
def test_a_correction_compares_whole_distributions(schedule, truncation):
    """On the same model, top_p=0.95 gave weights of 0.816 to 1 that should all be 1."""
    correction = "algorithm.rollout_correction.rollout_is=token"
    truncation = f"actor_rollout_ref.rollout.{truncation}"
    with pytest.raises(ValueError, match=f"rollout_is=token with {truncation}: .* truncated distribution"):
        check_parts(composed(schedule, correction, truncation))
    check_parts(composed(schedule, "algorithm.rollout_correction.rollout_is=null", truncation))
    check_parts(composed(schedule, correction, truncation, "actor_rollout_ref.rollout.logprobs_mode=raw_logprobs"))
    check_parts(composed(schedule, correction, "actor_rollout_ref.rollout.top_k=0"))


def test_why_the_trainers_gpus_must_hold_servers():
    """`Logger.info` takes no `flush`: when this is gone, so can be the refusal of hybrid_engine=false."""
    source = inspect.getsource(trainer_separate_async.PPOTrainerSeparateAsync._setup)
    assert "flush=True" in source and "logger.info(" in source


def test_what_the_synchronous_schedule_takes():
    check_parts(composed("tree=hato", *BOUND))
    check_parts(composed("tree=hato", "hato.meta_learning.enable=true"))
