"""Registers `task=walk`."""

from verl.utils.tasks import register_task

register_task(
    "walk",
    "The number walk: from a start to a target in a number of steps, each by one of a few operations",
    cpu_lengths=(24, 40),
)
