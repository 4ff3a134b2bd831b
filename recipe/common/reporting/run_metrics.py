"""Reads the training metrics of finished or running runs.

A run's metrics are the lines of verl's `file` logger, `{"step": 3, "data": {"actor/entropy": 1.2, ...}}`, in
`<run folder>/metrics.jsonl` (point VERL_FILE_LOGGER_PATH there). That logger empties its file when a run resumes, so
the launcher keeps earlier attempts as `metrics.001.jsonl`, ... `load_metrics` joins them in one table, and
run_curves.py draws it.
"""

import json
import math
import re
from pathlib import Path

import pandas as pd

METRICS_FILE = "metrics.jsonl"
EARLIER_ATTEMPTS = "metrics.[0-9]*.jsonl"
WARM_UP_STEPS = 2
VAL_ACCURACY = re.compile(r"val-core/(?P<dataset>.+)/acc/mean@(?P<n>\d+)")
# HATO's buffer counts generated prompts / trained prompts; upstream's buffer counts the dropped prompts
GENERATED_BATCHES = "training/filter_groups/gen_batches"
DROPPED_PROMPTS = tuple(f"training/filter_groups/{name}" for name in ("evicted_samples", "discarded_surplus_samples"))
PHASES = ("gen", "reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor", "update_weights")
PHASES += ("save_checkpoint", "testing")


def metrics_files(path: str | Path) -> list[Path]:
    """Return the metrics files of a run folder, oldest attempt first, or the file itself if `path` is a file."""
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such run folder or metrics file")
    if path.is_file():
        return [path]
    earlier = sorted(path.glob(EARLIER_ATTEMPTS), key=lambda file: (len(file.name), file.name))
    files = [file for file in [*earlier, path / METRICS_FILE] if file.is_file()]
    if not files:
        raise FileNotFoundError(f"{path}: expected {METRICS_FILE} in this folder; set VERL_FILE_LOGGER_PATH to make it")
    return files


def load_metrics(path: str | Path) -> pd.DataFrame:
    """Return a row per step (index `step`, ascending) and a float column per metric; NaN if a step did not log it.

    When a step is logged again (a resumed run), each metric's last value wins. An attempt in a file of its own also
    replaces all later steps of earlier attempts: attempts 0..14 and 10..12 make the run 0..12. An incomplete last
    line, which a killed run leaves behind, is skipped. Text and lists are not metrics and are left out.
    """
    rows: dict[int, dict[str, float]] = {}
    for file in metrics_files(path):
        attempt = _read_attempt(file)
        start = next(iter(attempt), math.inf)
        rows = {step: row for step, row in rows.items() if step <= start}
        for step, row in attempt.items():
            rows.setdefault(step, {}).update(row)
    if not rows:
        raise ValueError(f'{path}: no metrics; expected lines like {{"step": 1, "data": {{"actor/entropy": 1.2}}}}')
    index = pd.Index(list(rows), name="step", dtype="int64")
    return pd.DataFrame(list(rows.values()), index=index, dtype="float64").sort_index()


def _read_attempt(file: Path) -> dict[int, dict[str, float]]:
    """Return step -> metrics, ordered by when each step was first logged. NaN is `null` in verl's file."""
    rows: dict[int, dict[str, float]] = {}
    lines = file.read_text(encoding="utf-8", errors="replace").rstrip().split("\n")
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):
                break
            raise ValueError(f"{file}, line {number}: not JSON: {line[:60]!r}") from error
        match record:
            case {"step": int(step), "data": dict(data)}:
                numbers = {key: value for key, value in data.items() if isinstance(value, int | float | None)}
                rows.setdefault(step, {}).update(numbers)
            case _:
                raise ValueError(f"{file}, line {number}: expected an integer step and a mapping data: {line[:60]!r}")
    return rows


def validation_accuracy(metrics: pd.DataFrame) -> dict[str, pd.Series]:
    """Return data source -> curve of the mean accuracy at the validation steps. A step with means over several numbers
    of samples per question keeps the mean over the most samples."""
    matches = filter(None, map(VAL_ACCURACY.fullmatch, metrics))
    curves: dict[str, pd.Series] = {}
    for match in sorted(matches, key=lambda match: -int(match["n"])):
        values = metrics[match[0]].dropna()
        if not values.empty:
            curves[match["dataset"]] = curves.get(match["dataset"], values).combine_first(values)
    return dict(sorted(curves.items()))


def phase_seconds(metrics: pd.DataFrame) -> dict[str, float]:
    """Return the seconds per training step that each phase costs in the steady state.

    The first two timed steps (compilation, caches) are left out if there are more. A phase costs its median over
    the steps that ran it, times the share of steps that ran it: testing for 30 s every 10th step costs 3 s a step.
    """
    columns = [f"timing_s/{phase}" for phase in PHASES if f"timing_s/{phase}" in metrics]
    timed = metrics[columns].dropna(how="all")
    steady = timed.iloc[WARM_UP_STEPS:] if len(timed) > WARM_UP_STEPS else timed
    ran = steady.notna()
    costs = (steady.median() * ran.mean())[ran.any()]
    return {name.removeprefix("timing_s/"): float(cost) for name, cost in costs.items()}


def generated_tokens(metrics: pd.DataFrame) -> pd.Series:
    """Return the number of tokens that the server generated in each step, including those of dropped prompts."""
    generated = metrics["tree/tokens_generated"] * metrics["tree/prompts"]
    if "hato/trees_dropped" in metrics:  # HATO's metric already counts them
        return generated
    if GENERATED_BATCHES in metrics:
        return generated * metrics[GENERATED_BATCHES]
    dropped = sum(metrics[name].fillna(0) for name in DROPPED_PROMPTS if name in metrics)
    return generated * (1 + dropped / metrics["tree/prompts"])
