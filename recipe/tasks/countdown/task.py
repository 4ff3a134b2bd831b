"""Registers `task=countdown`."""

from verl.utils.tasks import register_task

register_task("countdown", "Countdown: reach the target with the given numbers")
