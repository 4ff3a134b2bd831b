"""The registry of tasks: what is learnt. A task is a folder, whose `task.py` calls `register_task`.

recipe/tasks/walk/task.py         register_task("walk", ...)
recipe/tasks/walk/task.yaml       config of a run: data files, reward, batch shapes; Hydra's choice `task=walk`
recipe/tasks/walk/data.py         makes the data
recipe/tasks/walk/reward.py       scores responses
recipe/tasks/walk/evaluation.py   questions and scores of its evaluation (verl/evaluation/questions/benchmarks.py)
recipe/tasks/walk/small.sh        data, tiny model and warm start (recipe/common/small_tasks.sh)
"""

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from verl.utils.parts import Part, add_part


@dataclass(frozen=True, kw_only=True)
class Task(Part):
    """A registered task, whose config values are in a file; its name is also the rows' `data_source` by which
    scripts/explore.sh finds it."""

    file: Path  # YAML file with the config of the choice; its folder is the task's
    # run script and overrides with which recipe/common/run_compare.sh trains a method that names no script; empty for a
    # task with a `small.sh`, which has the script of all such tasks
    script: tuple[str, ...] = ()
    # lengths of prompts and responses in scripts/explore.sh on a CPU; None for those of `hardware=cpu`
    cpu_lengths: tuple[int, int] | None = None

    @property
    def is_small(self) -> bool:
        """Return whether the scripts for small models can train it."""
        return self.file.with_name("small.sh").is_file()

    def node(self) -> DictConfig:
        """Return the config of the choice."""
        return OmegaConf.load(self.file)


def register_task(
    name: str, about: str, *, file: str = "task.yaml", tree_file: str | None = None, **options: Any
) -> Task:
    """Register a task as `task=<name>`; call it in the task's folder, which holds its YAML `file`, and a `tree_file`
    with keys of trees that change with this task (the choice `tree_of_task=<name>`). `options`: see `Task` and `Part`.
    """
    folder = Path(inspect.currentframe().f_back.f_code.co_filename).parent  # type: ignore[union-attr]
    if tree_file is not None:
        node = OmegaConf.load(folder / tree_file)
        ConfigStore.instance().store(group="tree_of_task", name=name, node=node, package="_global_")
    return add_part("task", name, Task(name=name, about=about, file=folder / file, **options))
