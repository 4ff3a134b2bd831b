"""Registers `task=word_problems`."""

from verl.utils.tasks import register_task

register_task(
    "word_problems",
    "Word problems: arithmetic in English with one to three operations",
    script=("recipe/common/run_smollm2_cpu.sh",),
    cpu_lengths=(128, 64),
)
