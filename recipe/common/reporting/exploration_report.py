"""Makes the table of scripts/explore.sh from the results of `verl.evaluation.exploration.run.diagnose`."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl.evaluation.scores.results import INTERVAL_ENDS
from verl.utils.atomic_files import replacing

Rows = Sequence[dict[str, Any]]
# A warning appears if a larger share of plain sampling's responses is cut.
FEW_CUT = 0.1


def table(rows: Rows, n: int) -> str:
    """Return the table of all policies in Markdown."""
    cells = [_cells(row, n) for row in rows]
    header = list(cells[0])
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *(row.values() for row in cells)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cells(row: dict[str, Any], n: int) -> dict[str, str]:
    low, high = (row[f"accuracy{end}"] for end in INTERVAL_ENDS)
    whole = "" if row["trajectories"] == n else f" of {row['trajectories']:.1f}"
    return {
        "policy": row["policy"],
        "accuracy (95 %)": f"{row['accuracy']:.3f} ({low:.3f} to {high:.3f})",
        f"Pass@{n}": f"{row[f'pass@{n}']:.3f}",
        "mixed groups": f"{row['mixed']:.3f}",
        "answers": f"{row['answers']:.1f}",
        "branches": f"{row['branches']:.1f}{whole}",
        "entropy": f"{row['entropy']:.3f}",
        "tokens generated": f"{row['tokens']:,.0f}",
        "unique share": f"{row['unique_share']:.2f}",
        **({"tool calls": f"{row['tool_calls']:.1f}"} if "tool_calls" in row else {}),
        "seconds": f"{row['seconds']:.1f}",
    }


def proposals(result: dict[str, Any]) -> list[str]:
    """Return two lines for each proposal: a heading, and the overrides, which begin with actor_rollout_ref."""
    lines = []
    for proposal in result["proposals"]:
        lines += [f"{proposal['policy']}, proposed ({proposal['expected']}):", proposal["overrides"]]
    return lines


def warnings(rows: Rows) -> list[str]:
    """Return a warning if more than FEW_CUT of the plain samples reach the length limit at every temperature."""
    cut = min(row["cut"] for row in rows if row["policy"].startswith("plain "))
    if cut <= FEW_CUT:
        return []
    return [f"warning: {cut:.0%} or more of plain sampling's responses are cut at data.max_response_length"]


def write(result: dict[str, Any], about: Sequence[str], n: int, stem: Path) -> list[Path]:
    """Write `about` and the table to `stem`.md, and all results to .json; return the two paths."""
    page, data = (stem.with_name(f"{stem.name}.{suffix}") for suffix in ("md", "json"))
    shown = "\n".join(["```", *proposals(result), "```"]) if result["proposals"] else ""
    rows = result["rows"]
    parts = ["\n".join(f"- {line}" for line in about), table(rows, n), *warnings(rows), shown]
    with replacing(page) as unfinished:
        unfinished.write_text("\n\n".join(filter(None, parts)) + "\n", encoding="utf-8")
    with replacing(data) as unfinished:
        unfinished.write_text(json.dumps({"about": list(about), "n": n, **result}, indent=1), encoding="utf-8")
    return [page, data]
