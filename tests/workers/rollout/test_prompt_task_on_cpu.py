"""What a worker reads from the row of a prompt."""

import pytest

from verl.workers.rollout.prompt_task import PROMPT_SETTINGS, STEP_SETTINGS, PromptSettings, PromptTask

ROW = {"uid": "u", "index": 3, "global_steps": 7, "raw_prompt": []}


def test_settings_are_read_and_do_not_travel_on():
    of_step = PromptSettings(sampler={"tau": 0.1}, tree=(0.9, 8))
    of_prompt = PromptSettings(occurrence=2, tree=(4,))
    task = PromptTask.of_row({**ROW, STEP_SETTINGS: of_step, PROMPT_SETTINGS: of_prompt})
    assert task.row == ROW and task.step == 7
    assert task.settings == PromptSettings(2, {"tau": 0.1}, (0.9, 8, 4))
    assert [task.settings.tree_record(kind) for kind in (float, int, str)] == [0.9, 4, None]


@pytest.mark.parametrize("columns", [{}, {STEP_SETTINGS: None, PROMPT_SETTINGS: None}])
def test_a_row_without_settings_has_the_defaults(columns):
    assert PromptTask.of_row({**ROW, **columns}) == PromptTask(ROW, 7, PromptSettings())
    assert PromptTask.of_row({"uid": "u"}).step == 0
