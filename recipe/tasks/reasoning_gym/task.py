"""Registers `task=reasoning_gym`."""

from verl.utils.tasks import register_task

register_task("reasoning_gym", "reasoning-gym: problems of more than a hundred families, each with its own verifier")
