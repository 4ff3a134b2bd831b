"""Leaves verl's own log-probabilities as they are on a CPU. Chosen by VERL_USE_EXTERNAL_MODULES, for grpo_step."""

from verl_patches import platform_cpu

del platform_cpu.REPAIRS["verl.utils.torch_functional"]
