"""An evaluation on two replicas of a model: both answer, and the samples are those of one."""

import json
import os
from pathlib import Path

import httpx
import pytest

from tests.configs import evaluation_config
from tests.forked import as_in_a_run
from verl.evaluation import main

pytestmark = pytest.mark.slow


def samples_of(inputs: Path, replicas: int) -> dict[tuple, str]:
    """(question, sample) -> response, of an evaluation that starts its own server."""
    settings = ["experiment=toy", "benchmark=countdown", f"files={inputs}/test.parquet", f"model={inputs}/model"]
    settings += [f"output_dir={inputs}/{replicas}", "n=16", "max_tokens=12", "temperature=1", "top_p=1", "top_k=-1"]
    main.evaluate(evaluation_config(*settings, f"server.data_parallel={replicas}"))
    _, *lines = (inputs / str(replicas) / "toy/countdown.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return {(row["question"], row["sample"]): row["response"] for row in rows}


def test_two_replicas_give_the_samples_of_one(inputs, monkeypatch):
    for name, value in as_in_a_run({**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}).items():
        monkeypatch.setenv(name, value)
    counters, collect = [], main._collect

    async def collect_and_count(plan, url, samples):
        await collect(plan, url, samples)
        counters.append(httpx.get(f"{url}/metrics", trust_env=False).text)

    monkeypatch.setattr(main, "_collect", collect_and_count)
    two, one = samples_of(inputs, 2), samples_of(inputs, 1)
    assert len(two) == 4 * 16 and len(set(two.values())) > 16
    assert two == one
    answered = [line for line in counters[0].splitlines() if line.startswith("vllm:request_success_total")]
    by_replica = {
        engine: sum(float(line.split()[-1]) for line in answered if f'engine="{engine}"' in line) for engine in (0, 1)
    }
    assert sum(by_replica.values()) == 64 and min(by_replica.values()) > 0, by_replica
