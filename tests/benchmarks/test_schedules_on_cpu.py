"""The page of the schedules' runs, of made metrics."""

import pandas as pd
import pytest

from benchmarks.schedules import OFF_POLICY, measurement, tokens_per_second


def metrics(seconds: float, tokens: float) -> pd.DataFrame:
    """Of two steps, the second of which has written a checkpoint for 5 s."""
    columns = {"timing_s/step": [seconds, seconds + 5], "timing_s/save_checkpoint": [None, 5.0]}
    columns |= {"timing_s/gen": [seconds / 2] * 2, "response_length/mean": [tokens] * 2, "tree/prompts": [16.0] * 2}
    columns |= {f"{OFF_POLICY}{name}": [1.0, 2.0] for name in ("staleness/mean", "spans/mean", "staleness_worst/max")}
    return pd.DataFrame(columns)


def test_rates_are_of_the_time_without_checkpoints():
    assert tokens_per_second(metrics(8.0, 10.0)) == pytest.approx(16 * 8 * 10 / 8)


def test_every_run_is_compared_with_the_synchronous_one_of_its_turn():
    runs = {
        "sync": [metrics(8.0, 10.0), metrics(4.0, 10.0)],
        "colocate_async": [metrics(4.0, 10.0), metrics(1.0, 10.0)],
    }
    header, _, *rows = (line.split(" | ") for line in measurement(10, runs) if line.startswith("| "))
    sync, ahead = (dict(zip(header, row, strict=True)) for row in rows)
    assert sync["times sync"] == "1.00 (1.00 to 1.00)" and ahead["times sync"] == "3.00 (2.00 to 4.00)"
    assert ahead["s a step"] == "2.5 (1.0 to 4.0)" and ahead["staleness"] == "1.50 (1.50 to 1.50)"
