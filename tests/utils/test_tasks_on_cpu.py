"""A task is its folder: one in a package beside is chosen, evaluated and listed; a task may extend another."""

import re

import pytest
from omegaconf import OmegaConf

from tests.configs import composed
from tests.utils.test_parts_on_cpu import ROOT, run_beside

CHECK = """
import os, subprocess, sys
from pathlib import Path
sys.path.append("scripts")
from explore import config_of
from recipe.common.menu import about_benchmark, about_choice, menu
from stranger.data import write_sorting
from recipe.common.compare_runs import EXPLORE, command_of
from verl.evaluation.questions.loading import read_questions
from verl.evaluation.scores.scoring import find_scoring

folder = Path(os.environ["PYTHONPATH"].split(":")[0])
write_sorting(folder)
config = config_of("model", f"{folder}/test.parquet", [])
assert config.reward.custom_reward_function.path == "pkg://stranger.reward"
assert "task=sorting " in menu() and "pkg://stranger.reward" in about_choice("task", "sorting")
assert command_of("passk", 10, "sorting") == [*EXPLORE, "credit=passk"]
question = read_questions("sorting", [folder / "test.parquet"]).questions[0]
score = find_scoring("sorting").score
assert score(question, question.answers[0]) == (1.0, question.answers[0], {}) and score(question, "1").score == 0
print(about_benchmark("sorting"))
shell = "source recipe/common/small_tasks.sh; use_task sorting; echo warm: $WARM_START; use_task chess"
subprocess.run(["bash", "-euc", shell])
"""


@pytest.mark.slow
def test_a_task_from_outside_is_chosen_evaluated_and_listed(tmp_path):
    """The task of docs/add_a_task.md, as a package."""
    (tmp_path / "stranger").mkdir()
    page = (ROOT / "docs/add_a_task.md").read_text()
    for name, text in re.findall(r"^```\w+ recipe/tasks/sorting/(\S+)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
        (tmp_path / "stranger" / name).write_text(text.replace("recipe.tasks.sorting", "stranger"))
    done = run_beside(tmp_path, CHECK, module="", name="sorting")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "scored by sorting: the digits in ascending order" in done.stdout
    assert "warm: warm_start_sorting" in done.stdout
    assert "error: TASK=chess: choose countdown, reasoning_gym, textworld, walk, sorting" in done.stderr


def test_a_task_extends_another_and_changes_keys_of_trees():
    reasoning, deepsearch, search, walk = (
        composed("explore", f"task={name}", "tree=arpo") for name in ("reasoning", "deepsearch", "search_task", "walk")
    )
    assert (reasoning.data.train_batch_size, deepsearch.data.train_batch_size) == (128, 64)
    for key in ("data.val_files", "actor_rollout_ref.rollout.n", "reward.custom_reward_function.path"):
        assert OmegaConf.select(deepsearch, key) == OmegaConf.select(reasoning, key)
    paths = [config.reward.custom_reward_function.path for config in (reasoning, search, walk)]
    assert paths == [*["pkg://recipe.tasks.deep_research.reward"] * 2, "pkg://recipe.tasks.walk.reward"]
    lengths = [config.actor_rollout_ref.rollout.entropy_tokens for config in (search, walk)]
    assert lengths == [8, 20], "the task's, and the tree's own"
