"""The registry of tasks: what is learnt. A task is a folder, whose `task.py` calls `register_task`.

    recipe/tasks/walk/task.py         register_task("walk", ...)
    recipe/tasks/walk/task.yaml       config of a run: data files, reward, batch shapes; Hydra's choice `task=walk`
    recipe/tasks/walk/data.py         makes the data
    recipe/tasks/walk/reward.py       scores responses
    recipe/tasks/walk/evaluation.py   questions and scores of its evaluation (verl/evaluation/questions/benchmarks.py)
    recipe/tasks/walk/small.sh        data, tiny model and warm start of the scripts for small models

Another package registers tasks by the entry-point group of parts (verl/utils/parts.py).
"""

import inspect
from dataclasses import dataclass
from pathlib import Path

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from verl.utils.parts import add_part


@dataclass(frozen=True, kw_only=True)
class Task:
    """A registered task.

    Args:
        name: the choice, as in `task=walk`; also the rows' `data_source` by which scripts/explore.sh finds it.
        about: a sentence for the menu.
        folder: folder of the task.
    """

    name: str
    about: str
    folder: Path


def register_task(name: str, about: str, *, file: str = "task.yaml", tree_file: str | None = None) -> Task:
    """Register a task as `task=<name>`; call it in the task's folder.

    Args:
        name, about: see `Task`.
        file: YAML file in the caller's folder with the config of the choice; it may have a defaults list.
        tree_file: YAML file there with keys of trees that change with this task, the choice `tree_of_task=<name>`.
    """
    folder = Path(inspect.stack()[1].filename).parent
    _store("task", name, folder / file)
    if tree_file is not None:
        _store("tree_of_task", name, folder / tree_file)
    return add_part("task", name, Task(name=name, about=about, folder=folder))


def _store(group: str, name: str, file: Path) -> None:
    ConfigStore.instance().store(group=group, name=name, node=OmegaConf.load(file), package="_global_")
