"""Every config composes on both profiles; with `recipe=<name>` it is the method's own, whose parts can be exchanged."""

import warnings

import pytest
from omegaconf import OmegaConf

from recipe.common.menu import RECIPES, choice_files
from tests.configs import composed
from tests.recipe.common.explore import SEARCH_PATH, explore
from tests.tables import table
from verl.trainer.checks.parts import check_typed_sections
from verl.trainer.checks.resources.cluster import check_ray_resources, config_asks_for_cpu

TRAINERS = dict(table(__file__, "trainers"))


def test_every_trainer_config_of_a_method_is_listed():
    files = {f"{file.parts[-3]}/{file.stem}" for file in RECIPES.glob("*/config/*_trainer.yaml")}
    assert files == {*TRAINERS, "common/grpo_trainer", "common/dapo_trainer"}


@pytest.mark.parametrize("trainer", TRAINERS)
def test_explore_with_a_recipe_is_the_methods_own_config(trainer):
    folder, name = trainer.split("/")
    assert explore(f"recipe={TRAINERS[trainer]}") == composed(name, recipe=folder)


def test_explore_finds_the_choices_of_every_recipe():
    folders = {file.parts[-4] for file in choice_files("recipe").values()} - {"common"}
    assert set(SEARCH_PATH) == {f"pkg://recipe.{folder}.config" for folder in folders}
    with warnings.catch_warnings():  # Hydra warns of a folder that is no package
        warnings.simplefilter("error", UserWarning)
        explore()


def test_a_part_on_the_command_line_replaces_the_recipes():
    config = explore("recipe=hapo", "tree=tree_grpo", "credit=tree_gain")
    rollout = config.actor_rollout_ref.rollout
    assert (rollout.tree, rollout.n, rollout.adaptive_temperature) == ("tree_grpo", 12, True)
    assert config.algorithm.adv_estimator == "tree_gain"
    assert config.actor_rollout_ref.actor.policy_loss.loss_mode == "hapo"
    assert config.algorithm.filter_groups.enable and config.reward.reward_kwargs.overlong_buffer_cfg.enable


def test_two_recipes_make_one_run():
    config = explore("recipe=[dapo,latr_math]")
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    assert (actor.clip_ratio_high, actor.clip_ratio_c, actor.kl_loss_coef) == (0.28, 10.0, 0.01)
    assert config.algorithm.filter_groups.enable and actor.use_kl_loss
    assert OmegaConf.to_container(rollout.kt.mix_ratio_schedule) == {0: 1.0, 100: 0.75, 200: 0.5, 300: 0.25}


@pytest.mark.parametrize("task", ["reasoning", "deepsearch", "search_task"])
def test_the_agents_tasks_have_their_reward_in_every_recipe(task):
    reward = explore(f"task={task}", "environment=tools").reward.custom_reward_function
    assert reward.path == "pkg://recipe.tasks.deep_research.reward"
    assert explore("recipe=arpo", "task=countdown").reward.custom_reward_function.path.endswith(".countdown.reward")


@pytest.mark.parametrize("hardware", ["cpu", "gpu"])
@pytest.mark.parametrize("name", ["grpo_trainer", "dapo_trainer"])
def test_composes_and_is_typed(name, hardware, monkeypatch):
    monkeypatch.setenv("PWD", "/somewhere")
    config = composed(name, f"hardware={hardware}", "trainer.experiment_name=test")
    check_typed_sections(config)
    if hardware == "cpu":  # the GPU profile counts the CPUs of the node that it runs on
        check_ray_resources(config)
    assert config_asks_for_cpu(config) == (hardware == "cpu")
    assert config.trainer.device == {"cpu": "cpu", "gpu": "cuda"}[hardware]
    OmegaConf.resolve(config.ray_kwargs)
    env = config.ray_kwargs.ray_init.runtime_env.env_vars
    assert env.VERL_FILE_LOGGER_PATH == "/somewhere/outputs/test/metrics.jsonl"
    assert config.actor_rollout_ref.rollout.agent.agent_loop_manager_class.endswith(".GroupAgentLoopManager")


def test_nothing_of_the_cpu_profile_is_in_the_gpu_profile():
    config = OmegaConf.to_yaml(composed("grpo_trainer", "hardware=gpu").ray_kwargs)
    assert "VERL_PLATFORM" not in config and "num_gpus" not in config


def test_dapo_is_grpo_with_the_papers_four_changes(monkeypatch):
    """arXiv 2503.14476: clip-higher 0.2/0.28, dynamic sampling, token-mean loss, overlong shaping."""
    dapo, grpo = (composed(f"{name}_trainer", "hardware=cpu") for name in ("dapo", "grpo"))
    actor = dapo.actor_rollout_ref.actor
    assert (actor.clip_ratio_low, actor.clip_ratio_high, actor.loss_agg_mode) == (0.2, 0.28, "token-mean")
    assert dapo.algorithm.filter_groups.enable and not grpo.algorithm.filter_groups.enable
    assert dapo.algorithm.filter_groups.metric == "acc"
    shaping = dapo.reward.reward_kwargs.overlong_buffer_cfg
    assert shaping.enable and 0 < shaping.len <= dapo.data.max_response_length
    assert not grpo.reward.reward_kwargs.overlong_buffer_cfg.enable
    assert dapo.algorithm.adv_estimator == grpo.algorithm.adv_estimator == "grpo"


def test_ray_logical_cpus_can_be_set_from_the_environment(monkeypatch):
    monkeypatch.setenv("RAY_LOGICAL_CPUS", "40")
    assert composed("grpo_trainer", "hardware=cpu").ray_kwargs.ray_init.num_cpus == 40
