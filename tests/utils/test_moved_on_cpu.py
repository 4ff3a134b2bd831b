"""Former names of rewards and tools in a config lead to the present modules."""

import importlib

import pytest

from tests.configs import composed
from verl.trainer.checks.settle import follow_moves
from verl.utils.moved import MOVED, present_name
from verl.workers.rollout.tools.search.tool import LocalSearchTool
from verl.workers.rollout.tools.tool_box import tool_class


@pytest.mark.parametrize("former", MOVED)
def test_a_former_module_has_a_present_one(former):
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(former)
    assert importlib.import_module(present_name(former))


@pytest.mark.parametrize("name", ["pkg://verl.utils.reward_score.qa", "verl.utils.reward_score.walks", "own.py"])
def test_other_names_stay(name):
    assert present_name(name) == name


def test_a_run_takes_former_names_of_its_reward_and_tools():
    config = composed("explore", "reward.custom_reward_function.path=pkg://verl.utils.reward_score.walk")
    follow_moves(config)
    assert config.reward.custom_reward_function.path == "pkg://recipe.tasks.walk.reward"
    former = {"class_path": "verl.workers.rollout.tools.search_tool.LocalSearchTool", "params": {"corpus": "any"}}
    assert tool_class("search", former)[0] is LocalSearchTool
