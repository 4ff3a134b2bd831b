"""Registers `task=textworld`."""

from verl.utils.tasks import register_task

register_task(
    "textworld",
    "Text games of TextWorld: the model plays, one command a turn, and the game gives the reward",
    cpu_lengths=(160, 224),
    requires="environment=gym, and the extra textworld",
)
