"""The input of a rollout for one prompt: the row of the data set and the trainer's settings."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

# columns of a prompt batch that hold PromptSettings: those of the whole batch, and those of each prompt
STEP_SETTINGS, PROMPT_SETTINGS = "step_settings", "prompt_settings"
T = TypeVar("T")


@dataclass(frozen=True)
class PromptSettings:
    """Settings that the trainer sends with a prompt."""

    occurrence: int = 0  # number of times this step has already submitted the problem; each time gets other seeds
    sampler: Mapping[str, Any] | None = None  # `extra_args` of requests to vLLM; None for ordinary sampling
    tree: tuple[Any, ...] = ()  # records that the tree policy reads, each of a type of its own

    def merged(self, other: "PromptSettings") -> "PromptSettings":
        """Return both settings as one; `occurrence` and `sampler` are `other`'s if it sets them."""
        tree = (*self.tree, *other.tree)
        return PromptSettings(other.occurrence or self.occurrence, other.sampler or self.sampler, tree)

    def tree_record(self, kind: type[T]) -> T | None:
        """Return the last record of a type among `tree`; None if there is none."""
        return next((record for record in reversed(self.tree) if isinstance(record, kind)), None)


@dataclass(frozen=True)
class PromptTask:
    """A prompt whose trajectories are to be grown: a row of the data set (`raw_prompt`, `index`, `extra_info`, …) with
    upstream's `uid`, whose columns are copied to every row of the batch, the training step, and the trainer's
    settings."""

    row: Mapping[str, Any]
    step: int = 0
    settings: PromptSettings = PromptSettings()

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> "PromptTask":
        """Return the task of a row that upstream passes to a worker; the columns with settings may be missing."""
        columns = {name: value for name, value in row.items() if name not in (STEP_SETTINGS, PROMPT_SETTINGS)}
        settings = PromptSettings()
        for name in (STEP_SETTINGS, PROMPT_SETTINGS):
            settings = settings.merged(row.get(name) or PromptSettings())
        return cls(columns, int(row.get("global_steps") or 0), settings)
