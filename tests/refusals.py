"""Tables of what is refused, text files beside the tests: kind | what is asked for | message; … stands for any text."""

import re
from pathlib import Path


def refused(test_file: str, kind: str) -> list[list[str]]:
    """Return (what is asked for, message) of each row of this kind in refused.txt beside the test."""
    lines = Path(test_file).with_name("refused.txt").read_text(encoding="utf-8").splitlines()
    return [line.split(" | ")[1:] for line in lines if line.startswith(f"{kind} |")]


def says(error: BaseException, message: str) -> bool:
    return bool(re.search(".*".join(map(re.escape, message.split("…"))), str(error), re.DOTALL))
