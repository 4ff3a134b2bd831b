"""The rows of refused.txt: (which check, overrides, message)."""

from pathlib import Path

LINES = Path(__file__).with_name("refused.txt").read_text().splitlines()
ROWS = [tuple(cell.strip() for cell in line.split("|")) for line in LINES if line and not line.startswith("#")]
