"""Counts of the prompt groups that a run has finished, and the first cause of those that failed."""

from dataclasses import dataclass

from verl.utils.fault_reports import cause_of


@dataclass
class GroupCounts:
    """Prompt groups of one partition since a step began.

    Args:
        finished: number of groups without an error.
        failed: number of groups with one.
        first_failure: the first error, as `kind: message`; empty if none failed.
    """

    finished: int = 0
    failed: int = 0
    first_failure: str = ""

    def add(self, error: BaseException | str | None = None) -> None:
        """Count a group that has failed with this error, or has finished without one."""
        if error is None:
            self.finished += 1
            return
        self.failed += 1
        self.first_failure = self.first_failure or (error if isinstance(error, str) else cause_of(error))

    def __add__(self, other: "GroupCounts") -> "GroupCounts":
        first = self.first_failure or other.first_failure
        return GroupCounts(self.finished + other.finished, self.failed + other.failed, first)

    def __str__(self) -> str:
        all_groups = self.finished + self.failed
        which = f"all {all_groups}" if not self.finished else f"{self.failed} of {all_groups}"
        return f"{which} prompt groups failed; the first: {self.first_failure}"
