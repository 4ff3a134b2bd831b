"""Former names of rewards and tools in a config lead to the present modules, and docs/moved.md lists them."""

import importlib
from pathlib import Path

import pytest

from tests.configs import composed
from verl.trainer.checks.settle import follow_moves
from verl.utils.moved import MOVED, present_name
from verl.workers.rollout.tools.search.tool import LocalSearchTool
from verl.workers.rollout.tools.tool_box import tool_class

PAGE = Path(__file__).resolve().parents[2] / "docs/moved.md"


@pytest.mark.parametrize("former", MOVED)
def test_a_former_module_has_a_present_one_and_a_row_of_the_page(former):
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(former)
    assert importlib.import_module(present_name(former))
    (row,) = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| `{former}` |")]
    assert f"`{MOVED[former]}`" in row


@pytest.mark.parametrize("name", ["pkg://verl.utils.reward_score.qa", "verl.utils.reward_score.walks", "own.py"])
def test_other_names_stay(name):
    assert present_name(name) == name


def test_a_run_takes_former_names_of_its_reward_and_tools():
    config = composed("explore", "reward.custom_reward_function.path=pkg://verl.utils.reward_score.walk")
    follow_moves(config)
    assert config.reward.custom_reward_function.path == "pkg://recipe.tasks.walk.reward"
    former = {"class_path": "verl.workers.rollout.tools.search_tool.LocalSearchTool", "params": {"corpus": "any"}}
    assert tool_class("search", former)[0] is LocalSearchTool
