"""Makes the tables and the picture of scripts/explore.sh from rows of `verl.evaluation.exploration.table.summary`."""

import json
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from recipe.common.reporting.run_metrics import STYLE, run_colors
from verl.evaluation.exploration.likelihoods import SIGNALS, USEFUL
from verl.evaluation.scores.results import INTERVAL_ENDS
from verl.utils.atomic_files import replacing

Rows = Sequence[dict[str, Any]]
LOW, HIGH = INTERVAL_ENDS
# A warning appears if a larger share of plain sampling's responses is cut.
FEW_CUT = 0.1


def table(rows: Rows, n: int) -> str:
    """Return the table of all policies in Markdown."""
    cells = [_cells(row, n) for row in rows]
    return _markdown(list(cells[0]), [list(row.values()) for row in cells])


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown, whose columns but the first are aligned to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
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


def likelihood_table(rows: Rows) -> str:
    """Return a paragraph and a Markdown table of how well each signal separates right from wrong responses; empty
    without rows."""
    if not rows:
        return ""
    lines = []
    for row in rows:
        cells = (f"{row[name]:.2f} ({row[name + LOW]:.2f} to {row[name + HIGH]:.2f})" for name in SIGNALS)
        lines.append([f"{row['share']:.0%}", *cells])
    share = next((f"{row['share']:.0%}" for row in rows if row[SIGNALS[0]] >= USEFUL), None)
    judged = f"The first share at which the reference's likelihood reaches {USEFUL}: {share or 'none'}."
    about = (
        f"How often a response that ends right has the higher number, of two in a group ({rows[0]['groups']} groups "
        "with both; 0.5 is chance): likelihood of the reference answer after the beginning, of a wrong answer, and of "
        f"the beginning itself. {judged}"
    )
    return about + "\n\n" + _markdown(["of the response", *SIGNALS], lines)


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


def draw(rows: Rows, n: int, output: Path) -> None:
    """Draw four panels: accuracy and Pass@n, mixed groups, entropy along the response, and generated tokens."""
    colors = run_colors([row["policy"] for row in rows])
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(14, 3.4 + 0.55 * len(rows)), layout="constrained")
        accuracy, mixed, entropy, tokens = figure.subplots(2, 2).flat
        _bars(accuracy, rows, {"accuracy": "accuracy", f"pass@{n}": f"Pass@{n}"}, colors)
        accuracy.set(title=f"Right answers: accuracy, and faint Pass@{n}", xlim=(0, 1))
        _bars(mixed, rows, {"mixed": "mixed groups"}, colors)
        mixed.set(title="Groups with right and wrong answers", xlim=(0, 1))
        for row in rows:
            points = _with_gaps(row["entropy_by_position"])
            entropy.plot(
                *zip(*points, strict=True), color=colors[row["policy"]], label=row["policy"], linewidth=1.6, marker="."
            )
        entropy.set(title="Entropy along the response", xlabel="position (tokens)", ylabel="nats", ylim=(0, None))
        entropy.legend(fontsize=8)
        _bars(tokens, rows, {"tokens": "tokens"}, colors)
        tokens.set(title="Tokens generated for a prompt")
        for i, row in enumerate(rows):
            note = f" {row['unique_share']:.0%} of the rows' tokens unique"
            tokens.annotate(note, (row["tokens"], i), va="center", fontsize=8)
        tokens.margins(x=0.45)
        with replacing(output) as temporary:
            figure.savefig(temporary, format="png", dpi=130)


def _with_gaps(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points of a curve with a NaN in each gap, so that no line is drawn across the gap."""
    width = min((after[0] - before[0] for before, after in pairwise(points)), default=1.0)
    with_gaps = list(points[:1])
    for before, after in pairwise(points):
        with_gaps += [(before[0] + width, math.nan)] if after[0] - before[0] > width else []
        with_gaps.append(after)
    return with_gaps


def _bars(ax: Axes, rows: Rows, names: dict[str, str], colors: dict[str, object]) -> None:
    """Draw the first metric's bars, with whiskers if it has an interval, over fainter bars of the other metrics."""
    first, *others = names
    places, shades = range(len(rows)), [colors[row["policy"]] for row in rows]
    for name in others:
        ax.barh(places, [row[name] for row in rows], 0.7, color=shades, alpha=0.3)
    ax.barh(places, [row[first] for row in rows], 0.7, color=shades, alpha=0.85)
    if first + INTERVAL_ENDS[0] in rows[0]:
        for at, row in zip(places, rows, strict=True):
            low, high = (row[first + end] for end in INTERVAL_ENDS)
            ax.errorbar((low + high) / 2, at, xerr=(high - low) / 2, fmt="none", ecolor="#333333", capsize=3)
    ax.set_yticks(places, [row["policy"] for row in rows])
    ax.invert_yaxis()
    ax.grid(visible=False, axis="y")


def write(result: dict[str, Any], about: Sequence[str], n: int, stem: Path) -> list[Path]:
    """Write `about` and the tables to `stem`.md, all results to .json, the picture to .png; return the three paths."""
    page, data, picture = (stem.with_name(f"{stem.name}.{suffix}") for suffix in ("md", "json", "png"))
    shown = "\n".join(["```", *proposals(result), "```"]) if result["proposals"] else ""
    rows = result["rows"]
    parts = ["\n".join(f"- {line}" for line in about), table(rows, n), *warnings(rows), shown]
    parts.append(likelihood_table(result.get("answer_likelihood", [])))
    text = "\n\n".join(filter(None, parts))
    with replacing(page) as unfinished:
        unfinished.write_text(text + "\n", encoding="utf-8")
    with replacing(data) as unfinished:
        unfinished.write_text(json.dumps({"about": list(about), "n": n, **result}, indent=1), encoding="utf-8")
    draw(rows, n, picture)
    return [page, data, picture]
