"""Every registered task keeps what tests/conformance/tasks.py asks of tasks."""

import asyncio

import pyarrow.parquet as pq
import pytest

from recipe.tasks.countdown.data import CountdownConfig, write_countdown
from recipe.tasks.reasoning_gym.data import ReasoningGymConfig, write_reasoning_gym
from recipe.tasks.search.data import SearchTaskConfig, write_search_task
from recipe.tasks.walk.data import WalkConfig, write_walks
from recipe.tasks.word_problems.data import WordProblemsConfig, write_word_problems
from tests.conformance.tasks import *  # noqa: F403
from verl.utils.parts import parts

PROMPT = [{"role": "user", "content": "1+1?"}]
PUBLIC = {"data_source": "math_dapo", "prompt": PROMPT, "reward_model": {"ground_truth": "2"}}
# tests/recipe/tasks/textworld makes games, with packages of its own
CODE = {"ground_truth": '{"inputs": ["1"], "outputs": ["2"]}'}
ROWS = {
    "code": PUBLIC | {"reward_model": CODE},
    "textworld": PUBLIC | {"reward_model": {"ground_truth": '{"walkthrough": ["look"]}'}},
}
MAKERS = {
    "countdown": lambda folder: write_countdown(folder, CountdownConfig(train_size=3, test_size=0, demo_size=0)),
    "search_task": lambda folder: asyncio.run(
        write_search_task(folder, SearchTaskConfig(people=20, train_size=3, test_size=3, demo_size=3))
    ),
    "reasoning_gym": lambda folder: write_reasoning_gym(
        folder, ReasoningGymConfig(train_size=3, test_size=3, demo_size=0)
    ),
    "walk": lambda folder: write_walks(folder, WalkConfig(train_size=3, valid_size=0, test_size=0, demo_size=0)),
    "word_problems": lambda folder: write_word_problems(
        folder, WordProblemsConfig(train_size=3, valid_size=0, test_size=0)
    ),
}


@pytest.fixture(params=list(parts("task")))
def task(request):
    return request.param


@pytest.fixture
def rows(task, tmp_path):
    """Rows of the task's own maker; tasks on public data have none, and get a row in their form."""
    if task not in MAKERS:
        return [dict(ROWS.get(task, PUBLIC))]
    return pq.read_table(MAKERS[task](tmp_path)["train"]).to_pylist()
