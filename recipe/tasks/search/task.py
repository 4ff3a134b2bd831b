"""Registers `task=search_task`."""

from verl.utils.tasks import register_task

register_task(
    "search_task",
    "The made search task, for the tiny model: two searches and a sum in about 80 tokens",
    tree_file="tree.yaml",
    script=("recipe/arpo/run_search_task_cpu.sh",),
)
