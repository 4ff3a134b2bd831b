"""Metrics on a full disk. A limit on the size of files stands in for it: both cut a write and raise OSError."""

import json
import logging
import resource

import pytest
from verl.utils.tracking import FileLogger, Tracking


@pytest.fixture
def full():
    """Let a file grow to so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_metrics_follow_once_there_is_room_again(tmp_path, monkeypatch, full, caplog):
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "metrics.jsonl"))
    logger = FileLogger("project", "experiment")
    logger.log({"loss": 1.0}, 1)
    with caplog.at_level(logging.WARNING):
        full(40)
        logger.log({"loss": 2.0}, 2)
        logger.log({"loss": 3.0}, 3)
        full(resource.RLIM_INFINITY)
    assert "metrics were not written, and the run goes on" in caplog.text
    logger.log({"loss": 4.0}, 4)
    logger.finish()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"step": n, "data": {"loss": float(n)}} for n in (1, 2, 3, 4)]


def test_a_full_disk_does_not_keep_metrics_from_the_other_loggers(monkeypatch, capsys):
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", "/dev/full")
    tracking = Tracking("project", "experiment", ["file", "console"], config={})
    tracking.log({"loss": 2.5}, 7)
    assert "step:7" in capsys.readouterr().out
