"""Tests of the servers that an evaluation starts on its GPUs, and of what it refuses before it starts any."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.configs import evaluation_config
from tests.tables import table
from verl.evaluation import main
from verl.evaluation.main import EvaluationError, evaluate, plan_of, server_options
from verl.evaluation.model.server import visible_gpus

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def config_of(tmp_path):
    """Composes an evaluation of a model that is a folder with empty files."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    (tmp_path / "model/model.safetensors").touch()
    (tmp_path / "gsm8k.jsonl").write_text(json.dumps({"question": "1+1?", "answer": "#### 2"}) + "\n")

    def config(*overrides: str):
        settings = ["experiment=toy", "benchmark=gsm8k", f"files={tmp_path}/gsm8k.jsonl", f"output_dir={tmp_path}"]
        return evaluation_config(*settings, f"model={tmp_path}/model", *overrides)

    return config


@pytest.fixture
def gpus(monkeypatch):
    def have(number: int | None) -> None:
        monkeypatch.setattr(main, "visible_gpus", lambda: number)

    return have


@pytest.fixture
def started(monkeypatch):
    """The options of the servers that would have been started; none is."""
    options = []

    @contextmanager
    def serving(model, log, given):
        options.append(given)
        raise RuntimeError("a test starts no server")
        yield

    monkeypatch.setattr(main, "serving", serving)
    return options


@pytest.mark.parametrize(("n_gpus", "overrides", "options", "requests"), table(__file__, "replicas"))
def test_as_many_replicas_as_there_are_gpus_for(config_of, gpus, n_gpus, overrides, options, requests):
    gpus(n_gpus)
    plan = plan_of(config_of(*overrides))
    assert server_options(plan) == ["--seed", "0", *options.split()]
    assert plan.requests_at_once == requests
    (told,) = [line for line in plan.describe() if line.startswith("server: ")]
    assert f"{requests} requests at once" in told
    assert ("the CPU" if n_gpus is None else f"of {n_gpus} GPUs") in told


@pytest.mark.parametrize(
    ("n_gpus", "tensor_parallel", "data_parallel", "message"),
    table(__file__, "too few gpus"),
)
def test_too_few_gpus_are_named_before_anything_starts(
    config_of, gpus, started, monkeypatch, n_gpus, tensor_parallel, data_parallel, message
):
    overrides = [f"server.tensor_parallel={tensor_parallel}", f"server.data_parallel={data_parallel or 'null'}"]
    gpus(n_gpus)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6")
    with pytest.raises(EvaluationError, match=message):
        evaluate(config_of(*overrides))
    assert not started
    monkeypatch.setenv("DRY_RUN", "1")  # perhaps on another machine than the evaluation's
    (told,) = [line for line in evaluate(config_of(*overrides)) if line.startswith("server: ")]
    assert told.startswith("server: none can start: server.tensor_parallel=")


def test_the_server_is_started_with_these_options(config_of, gpus, started):
    gpus(8)
    config = config_of(
        "server.options=[--gpu-memory-utilization,0.5,--enforce-eager]", "server.max_model_len=4096", "seed=7"
    )
    with pytest.raises(RuntimeError, match="a test starts no server"):
        evaluate(config)
    expected = "--seed 7 --tensor-parallel-size 1 --data-parallel-size 8 --max-model-len 4096 "
    expected += "--gpu-memory-utilization 0.5 --enforce-eager"
    assert started == [expected.split()]


def test_the_cpu_profile_has_no_gpus_and_others_are_counted_by_torch(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 5)
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    assert visible_gpus() is None
    monkeypatch.delenv("VERL_PLATFORM")
    assert visible_gpus() == 5 and not torch.cuda.is_initialized()


def test_open_files_are_allowed_for_all_connections():
    program = """
import resource, sys
from verl.evaluation.model.server import allow_open_files
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 4096))
for connections in map(int, sys.argv[1:]):
    allow_open_files(connections)
    print(resource.getrlimit(resource.RLIMIT_NOFILE))
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program, "256", "2048", "8192"]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ended.stdout.splitlines() == ["(1024, 4096)", f"({2048 + 256}, 4096)", "(4096, 4096)"]
