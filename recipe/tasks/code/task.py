"""Registers `task=code`."""

from verl.utils.tasks import register_task

register_task("code", "Code: programs and functions, rewarded by unit tests in the sandbox of the Python tool")
