"""`explore` with `recipe=<name>` is the method's own config, whose parts can be exchanged and whose values stay."""

import warnings

import pytest
from omegaconf import OmegaConf

from recipe.common.menu import RECIPES, choice_files
from tests.configs import composed
from tests.recipe.common.explore import SEARCH_PATH, explore
from tests.tables import table

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
