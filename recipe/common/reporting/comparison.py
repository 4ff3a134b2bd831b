"""Compares experiments in a Markdown table and a bar chart, with bootstrap intervals if the results have them.

`scripts/read_log.py` makes both. Metrics are named as in `verl.evaluation.scores.results`; `<name>-Low` and
`<name>-High` are the ends of the interval of `<name>`.
"""

from collections.abc import Iterator
from pathlib import Path

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from recipe.common.reporting.run_metrics import STYLE, legend_above, run_colors
from verl.evaluation.scores.results import INTERVAL_ENDS
from verl.utils.atomic_files import replacing

# experiment -> data set -> metric -> value
Results = dict[str, dict[str, dict[str, float]]]
PASS_AT_1 = "Acc-Pass@1"
WHISKER = "#333333"


def datasets_of(results: Results) -> list[str]:
    return list(dict.fromkeys(dataset for by_dataset in results.values() for dataset in by_dataset))


def metrics_of(results: Results, dataset: str) -> list[str]:
    """Return the metrics that any experiment has on a data set, without the ends of intervals."""
    columns = (name for by_dataset in results.values() for name in by_dataset.get(dataset, {}))
    return [name for name in dict.fromkeys(columns) if not name.endswith(INTERVAL_ENDS)]


def interval(metrics: dict[str, float], name: str) -> tuple[float, float] | None:
    low, high = (metrics.get(f"{name}{end}") for end in INTERVAL_ENDS)
    return None if low is None or high is None else (low, high)


def _cell(metrics: dict[str, float], name: str) -> str:
    if name not in metrics:
        return ""
    digits = 3 if name.startswith(("Acc-", "Cut-")) else 0 if name == "Questions" else 2
    text, ends = f"{metrics[name]:.{digits}f}", interval(metrics, name)
    return text if ends is None else f"{text} ({ends[0]:.{digits}f} to {ends[1]:.{digits}f})"


def _table(header: list[str], rows: list[list[str]]) -> Iterator[str]:
    yield f"| {' | '.join(header)} |"
    yield f"|{'---|' * len(header)}"
    yield from (f"| {' | '.join(row)} |" for row in rows)


def markdown(results: Results) -> str:
    """Return Markdown with a table of Pass@1 on all data sets, if there are several, then a table for each data set.

    Only experiments with results on all data sets get an average over them. A data set's table has at most four metrics
    (`_columns`); the CSV beside it has all.
    """
    datasets, lines = datasets_of(results), []
    if len(datasets) > 1:
        rows = []
        for experiment, by_dataset in results.items():
            all_metrics = [by_dataset.get(dataset, {}) for dataset in datasets]
            scores = [metrics[PASS_AT_1] for metrics in all_metrics if PASS_AT_1 in metrics]
            average = f"{sum(scores) / len(scores):.3f}" if len(scores) == len(datasets) else ""
            rows.append([experiment, *(_cell(metrics, PASS_AT_1) for metrics in all_metrics), average])
        lines += ["## Pass@1", "", *_table(["experiment", *datasets, "average"], rows), ""]
    for dataset in datasets:
        names = _columns(metrics_of(results, dataset))
        rows = [
            [experiment, *(_cell(by_dataset[dataset], name) for name in names)]
            for experiment, by_dataset in results.items()
            if dataset in by_dataset
        ]
        lines += [f"## {dataset}", "", *_table(["experiment", *(n.removeprefix("Acc-") for n in names)], rows), ""]
    lines.append("In parentheses: 95 % bootstrap intervals over questions, where an evaluation gives them. Cut-Share:")
    lines.append("of responses that ended at a limit of tokens or calls. The CSV has all metrics.")
    return "\n".join(lines) + "\n"


def _bars(names: list[str]) -> list[str]:
    """Return the metrics that a panel shows: Pass@1, and Best@k and Maj@k with the largest k."""
    shown = [name for name in names if name == PASS_AT_1]
    for kind in ("Acc-Best@", "Acc-Maj@"):
        same_kind = [name for name in names if name.startswith(kind)]
        shown += sorted(same_kind, key=lambda name: int(name.partition("@")[2]))[-1:]
    return shown


def _columns(names: list[str]) -> list[str]:
    """Return the metrics that a table shows: up to four that say what was reached, on how much, and at which length."""
    first = [PASS_AT_1, "Questions", "Cut-Share", *reversed(_bars(names)[1:]), "Response-Length-Mean"]
    return [name for name in first if name in names][:4]


def plot_comparison(results: Results, output: str | Path) -> Path:
    """Draw a panel for each data set, a color an experiment, whiskers for intervals; the suffix sets the format."""
    datasets = [dataset for dataset in datasets_of(results) if _bars(metrics_of(results, dataset))]
    if not datasets:
        raise ValueError(f"no accuracy to draw; expected metrics like {PASS_AT_1}")
    output, colors = Path(output), run_colors(list(results))
    columns = min(3, len(datasets))
    rows = -(-len(datasets) // columns)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(max(7, 5 * columns), 4.2 * rows), layout="constrained")
        axes = list(figure.subplots(rows, columns, squeeze=False).flat)
        for ax, dataset in zip(axes, datasets, strict=False):
            _draw_bars(ax, dataset, results, colors)
        for ax in axes[len(datasets) :]:
            ax.set_axis_off()
        handles: list[Artist] = [Patch(color=color, label=label) for label, color in colors.items()]
        handles.append(Line2D([], [], color=WHISKER, marker="|", label="95 % interval over questions"))
        legend_above(figure, handles, most_columns=3, fontsize=10)
        with replacing(output) as temporary:
            figure.savefig(temporary, format=output.suffix.lstrip(".") or "png", dpi=130)
    return output


def _draw_bars(ax: Axes, dataset: str, results: Results, colors: dict) -> None:
    names = _bars(metrics_of(results, dataset))
    width = 0.8 / len(results)
    for i, (experiment, by_dataset) in enumerate(results.items()):
        metrics = by_dataset.get(dataset, {})
        for group, name in enumerate(names):
            if name not in metrics:
                continue
            at, value = group - 0.4 + (i + 0.5) * width, metrics[name]
            low, high = interval(metrics, name) or (value, value)
            ax.bar(at, value, width * 0.92, color=colors[experiment])
            if low < high:
                ax.errorbar(at, (low + high) / 2, (high - low) / 2, fmt="none", ecolor=WHISKER, capsize=3)
            ax.annotate(f"{value:.2f}", (at, high), (0, 2), textcoords="offset points", ha="center", fontsize=8)
    ax.set(title=dataset, ylabel="accuracy", ylim=(0, 1.05))
    ax.set_xticks(range(len(names)), [name.removeprefix("Acc-") for name in names])
    ax.grid(visible=False, axis="x")
