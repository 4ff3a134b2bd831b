"""Writes the numbers of an evaluation as result lines, and reads them back.

An evaluation log is free text for people. Each dataset's numbers are also on a line for programs:
    RESULT {"experiment": "grpo-tiny", "step": 200, "dataset": "countdown", "n_samples": 8, "n_questions": 64,
            "metrics": {"Acc-Pass@1": 0.45, "Acc-Best@8": 0.81, "Response-Length-Mean": 31.5},
            "settings": {"temperature": 1.0, "top_p": 1.0, "prompt": "plain", "judge": "none", …}}
(a single line in the file). The evaluation and `scripts/read_log.py` both use this module, so that they agree.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PREFIX = "RESULT "
# endings that make a metric's name into the name of an end of its interval
INTERVAL_ENDS = ("-Low", "-High")
PASS_AT_1 = "Acc-Pass@1"


@dataclass(frozen=True, kw_only=True)
class EvalResult:
    """The result of evaluating a checkpoint on a dataset."""

    experiment: str
    step: int | None  # None for a model that was not trained here
    dataset: str
    n_samples: int  # number of answers to each question
    n_questions: int
    metrics: dict[str, float]  # finite; accuracies (`Acc-...`) lie in [0, 1]; see `metrics.measure`
    settings: dict[str, Any] = field(default_factory=dict)  # from `Plan.reported`; empty in older logs

    @property
    def numbers(self) -> dict[str, float]:
        """The metrics, and what they rest on: the number of questions, and the largest response in tokens."""
        longest = {"Max-Tokens": self.settings["max_tokens"]} if "max_tokens" in self.settings else {}
        return self.metrics | {"Questions": self.n_questions} | longest

    def __post_init__(self):
        for name, value in self.metrics.items():
            if not math.isfinite(value) or (name.startswith("Acc-") and not 0 <= value <= 1):
                raise ValueError(f"metrics[{name!r}] must be finite, and an accuracy in [0, 1], got {value!r}")


def format_result(result: EvalResult) -> list[str]:
    """Return a small table for people and a `RESULT {json}` line; no line contains a line break."""
    at_step = "" if result.step is None else f" at step {result.step}"
    counts = f"{result.n_questions} questions x {result.n_samples} samples"
    lines = [" ".join(f"{result.experiment}{at_step} on {result.dataset}, {counts}".splitlines())]
    width = max(len(name) for name in result.metrics)
    cut = f", {result.metrics['Cut-Share']:.1%} cut" if "Cut-Share" in result.metrics else ""
    beside = f"  (n={result.n_questions} x {result.n_samples}{cut})"
    for name, value in result.metrics.items():
        is_accuracy = name.startswith("Acc-") and not name.endswith(INTERVAL_ENDS)
        lines.append(f"  {name:<{width}}  {value:.4f}{beside if is_accuracy else ''}")
    return [*lines, PREFIX + json.dumps(asdict(result), ensure_ascii=True)]


def pass_at_1(metrics: Mapping[str, float]) -> str:
    """Return Pass@1 and its interval, if there is one, such as `0.450 (0.380 to 0.520)`; empty without Pass@1."""
    if PASS_AT_1 not in metrics:
        return ""
    ends = [f"{metrics[PASS_AT_1 + end]:.3f}" for end in INTERVAL_ENDS if PASS_AT_1 + end in metrics]
    return f"{metrics[PASS_AT_1]:.3f}" + (f" ({' to '.join(ends)})" if ends else "")


def parse_result_lines(lines: Iterable[str], source: str = "log") -> list[EvalResult]:
    """Return the results in a log, in order; every line that does not start with `RESULT {` is free text."""
    results = []
    for number, line in enumerate(lines, start=1):
        if line.startswith(PREFIX + "{"):
            try:
                results.append(EvalResult(**json.loads(line.removeprefix(PREFIX))))
            except (ValueError, TypeError, AttributeError) as error:
                raise ValueError(f"{source}, line {number}: bad RESULT line: {error}") from error
    return results


def read_result_log(path: Path) -> list[EvalResult]:
    """Return the results of an evaluation's log; raise ValueError if it has none."""
    results = parse_result_lines(path.read_text(encoding="utf-8", errors="replace").split("\n"), source=str(path))
    if not results:
        raise ValueError(f"{path}: no lines like RESULT {{json}}: expected the log of an evaluation that has ended")
    return results
