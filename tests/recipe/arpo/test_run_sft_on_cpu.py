"""The cold start's config has upstream's types; its script checks before it starts."""

import os
import subprocess
from pathlib import Path

import pandas as pd
import pytest
from hydra import compose, initialize_config_dir
from verl.utils.config import omega_conf_to_dataclass

import verl.trainer
from tests.forked import run_two_at_a_time, with_forks

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
UPSTREAM = Path(verl.trainer.__path__[0]) / "config"


def composed(*overrides: str):
    search = f"hydra.searchpath=[file://{UPSTREAM},pkg://recipe.common.config.sft]"
    with initialize_config_dir(str(ROOT / "recipe/arpo/config"), version_base=None):
        return compose("arpo_sft", overrides=[search, *overrides])


@pytest.mark.parametrize(("hardware", "device"), [("cpu", "cpu"), ("gpu", "cuda")])
def test_the_config_is_of_upstreams_types(hardware, device, monkeypatch):
    monkeypatch.setenv("N_GPUS_PER_NODE", "8")
    config = composed(f"hardware={hardware}")
    assert config.trainer.device == device
    for section in (config.optim, config.engine, config.checkpoint):
        omega_conf_to_dataclass(section)
    assert config.data.max_token_len_per_gpu >= config.data.max_length


def dry_run(folder: Path, *overrides: str, **env: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "DRY_RUN": "1", "DATA_DIR": str(folder), "RUN_DIR": str(folder / "run"), **env}
    return run_two_at_a_time([(["bash", "recipe/arpo/run_sft.sh", *overrides], with_forks(env))])[0]


def test_a_dry_run_tells_the_plan_and_starts_nothing(tmp_path):
    pd.DataFrame({"messages": [[{"role": "user", "content": "x"}]] * 20}).to_parquet(tmp_path / "train.parquet")
    result = dry_run(tmp_path, N_GPUS_PER_NODE="4")
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout == "20 responses to learn, 4 process(es); nothing was started\n"
    assert not (tmp_path / "run").exists()


def test_a_dry_run_names_mistakes(tmp_path):
    result = dry_run(tmp_path)
    assert result.returncode != 0 and f"{tmp_path}/train.parquet does not exist" in result.stderr
    pd.DataFrame({"messages": [[]]}).to_parquet(tmp_path / "train.parquet")
    result = dry_run(tmp_path, "data.no_such_key=1")
    assert result.returncode != 0 and "no_such_key" in result.stderr
    assert "choose cpu or gpu" in dry_run(tmp_path, HARDWARE="tpu").stderr
