"""The rows of refused.txt of one kind: (what is asked for, the message)."""

from pathlib import Path

ROWS = [line.split(" | ") for line in Path(__file__).with_name("refused.txt").read_text().splitlines()]


def refused(kind: str) -> list[list[str]]:
    return [row[1:] for row in ROWS if row[0] == kind]
