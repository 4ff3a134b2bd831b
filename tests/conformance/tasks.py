"""Tests that hold for every task: its config composes, its reward scores text, and its rows pass the checks of rows.

    from tests.conformance.tasks import *  # noqa: F403

    @pytest.fixture(params=["my_task"])  # names of registered tasks
    def task(request):
        return request.param

So far it asks for the config alone; a test of rewards with bad truths, and one of made rows, have their place here.
"""

from tests.configs import composed
from verl.trainer.checks.parts import check_parts
from verl.utils.parts import parts


def test_the_parts_of_a_run_of_the_task_go_together(task):
    """The data, models and services need not be here."""
    check_parts(composed("explore", "hardware=cpu", f"task={task}"))


def test_the_task_is_described_and_lies_in_a_folder_of_its_own(task):
    part = parts("task")[task]
    assert part.name == task and len(part.about.split()) > 1 and (part.folder / "task.py").exists()


__all__ = [name for name in dir() if name.startswith("test_")]
