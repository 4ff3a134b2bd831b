"""Tests that hold for every task: its config composes, its reward scores text, and its rows pass the checks of rows.

from tests.conformance.tasks import *  # noqa: F403

@pytest.fixture(params=["my_task"])  # names of registered tasks
def task(request):
    return request.param

@pytest.fixture
def rows(task, tmp_path):  # some rows of its data
    return pq.read_table(write_my_task(tmp_path)).to_pylist()
"""

import math

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from verl.utils.import_utils import load_module

from tests.configs import composed
from verl.trainer.checks.parts import check_parts
from verl.trainer.checks.preflight import check_files
from verl.trainer.checks.rows import check_reward_rows
from verl.utils.parts import parts

TEXTS = ("", "1", "<answer>1</answer>", r"\boxed{" * 50, "<answer>" * 50, "\x00\ud800", "9" * 5000, "</answer><answer>")


def config_of(task: str, rows: list[dict], folder):
    """Return a run's config with these rows as its data."""
    file = folder / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows), file)
    files = [f"data.train_files={file}", f"data.val_files={file}"]
    return composed("explore", "hardware=cpu", f"task={task}", *files)


def test_the_parts_of_a_run_of_the_task_go_together(task):
    """The data, models and services need not be here."""
    check_parts(composed("explore", "hardware=cpu", f"task={task}"))


def test_the_task_is_described_and_lies_in_a_folder_of_its_own(task):
    part = parts("task")[task]
    assert part.name == task and len(part.about.split()) > 1 and (part.file.parent / "task.py").exists()


def test_its_rows_pass_the_checks_and_a_row_without_a_truth_is_named(task, rows, tmp_path):
    config = config_of(task, rows, tmp_path)
    check_files(config)
    check_reward_rows(config)
    for row in rows:
        row["reward_model"] = {"ground_truth": ""}
    with pytest.raises(ValueError, match="data.train_files: .*rows.parquet: row 0: .*ground_truth"):
        check_reward_rows(config_of(task, rows, tmp_path))


def test_the_reward_scores_any_text(task, rows, tmp_path):
    reward = config_of(task, rows, tmp_path).reward.custom_reward_function
    score = getattr(load_module(reward.path), reward.name)
    for row in rows:
        asked = {"data_source": row["data_source"], "ground_truth": row["reward_model"]["ground_truth"]}
        for text in TEXTS:
            result = score(solution_str=text, extra_info=row.get("extra_info") or {}, **asked)
            assert math.isfinite(result["score"]) and result["acc"] in (0, 1)


__all__ = [name for name in dir() if name.startswith("test_")]
