"""Registers `task=math`."""

from verl.utils.tasks import register_task

register_task("math", "Mathematics: DAPO-Math-17k to train on, any set in verl's format to validate on")
