"""What a rollout knows of one prompt: the row of the data set, and what the trainer says about it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# columns of a batch of prompts with PromptSettings: one for the whole batch, and one for each prompt
STEP_SETTINGS, PROMPT_SETTINGS = "step_settings", "prompt_settings"


@dataclass(frozen=True)
class PromptSettings:
    """What the trainer sends with a prompt.

    Args:
        occurrence: how often this step has submitted the same problem before, so that it gets other seeds.
        sampler: what the requests carry to vLLM as `extra_args`; None for ordinary sampling.
        tree: what the tree's policy reads, by names of its own.
    """

    occurrence: int = 0
    sampler: Mapping[str, Any] | None = None
    tree: Mapping[str, Any] = field(default_factory=dict)

    def merged(self, other: "PromptSettings") -> "PromptSettings":
        """Return both; where they differ, the other one's."""
        return PromptSettings(
            other.occurrence or self.occurrence, other.sampler or self.sampler, {**self.tree, **other.tree}
        )


@dataclass(frozen=True)
class PromptTask:
    """A prompt whose trajectories are to be grown.

    Args:
        row: the row of the data set (`raw_prompt`, `index`, `extra_info`, …) with upstream's `uid`; its columns go with
            every row of the batch.
        step: the training step.
    """

    row: Mapping[str, Any]
    step: int = 0
    settings: PromptSettings = PromptSettings()

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> "PromptTask":
        """Return the task of a row as upstream hands it to a worker, with the settings' columns or without."""
        columns = {name: value for name, value in row.items() if name not in (STEP_SETTINGS, PROMPT_SETTINGS)}
        settings = PromptSettings()
        for name in (STEP_SETTINGS, PROMPT_SETTINGS):
            settings = settings.merged(row.get(name) or PromptSettings())
        return cls(columns, int(row.get("global_steps") or 0), settings)
