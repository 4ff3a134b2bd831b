"""Counts of a run's finished and failed prompt groups, with the first error."""

from dataclasses import dataclass

from verl.utils.fault_reports import cause_of


@dataclass
class GroupCounts:
    """Counts of one partition's prompt groups since a step began."""

    finished: int = 0
    failed: int = 0
    first_failure: str = ""  # first error, as `kind: message`

    def add(self, error: BaseException | None = None) -> None:
        """Count one group: as failed if `error` is its error, as finished if `error` is None."""
        if error is None:
            self.finished += 1
        else:
            self.failed += 1
            self.first_failure = self.first_failure or cause_of(error)

    def __add__(self, other: "GroupCounts") -> "GroupCounts":
        first = self.first_failure or other.first_failure
        return GroupCounts(self.finished + other.finished, self.failed + other.failed, first)

    def __str__(self) -> str:
        all_groups = self.finished + self.failed
        which = f"all {all_groups}" if not self.finished else f"{self.failed} of {all_groups}"
        return f"{which} prompt groups failed; the first: {self.first_failure}"
