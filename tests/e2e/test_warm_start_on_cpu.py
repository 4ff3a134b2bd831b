"""The warm start as a GPU run does it, of two workers on gloo: its micro-batches are bounded by tokens, since a batch
of 32 has few rows for each of eight GPUs, and its learning rate is a pretrained model's. One launch of half a minute.
"""

import json
import os
import subprocess

import pytest
from safetensors.torch import load_file

from recipe.common.tiny_model import TinyModelConfig, write_tiny_model
from recipe.tasks.countdown.data import CountdownConfig, write_countdown
from tests.e2e.runs import ROOT

# settings from the profile hardware=cpu that a machine without GPUs needs
NO_GPU = ["trainer.device=cpu", "+model.override_config.attn_implementation=sdpa", "engine.dtype=float32"]
NO_GPU += ["+engine.mixed_precision={param_dtype: fp32, reduce_dtype: fp32, buffer_dtype: fp32}"]
NO_GPU += ["engine.use_torch_compile=false", "data.num_workers=0"]
pytestmark = pytest.mark.slow


def test_two_workers_start_a_model_warm_with_the_gpu_profile(tmp_path):
    write_countdown(tmp_path / "data", CountdownConfig(train_size=8, test_size=4, demo_size=160))
    model = write_tiny_model(tmp_path / "model", TinyModelConfig(tie_word_embeddings=False))
    env = {**os.environ, "HARDWARE": "gpu", "N_GPUS_PER_NODE": "2", "VERL_PLATFORM": "cpu", "OMP_NUM_THREADS": "1"}
    env |= {"DATA_DIR": f"{tmp_path}/data", "MODEL_PATH": str(model), "RUN_DIR": f"{tmp_path}/run"}
    command = ["bash", "recipe/common/run_warm_start.sh", *NO_GPU]
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    steps = [json.loads(line)["data"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    losses = [step["train/loss"] for step in steps if "train/loss" in step]
    assert len(losses) == 160 // 32 and all(0 < loss < 10 for loss in losses)
    # a quarter of the way into the cosine the rate is near its peak
    assert max(step.get("train/lr", 0) for step in steps) == pytest.approx(1e-5, rel=0.2)
    trained, start = (load_file(f"{folder}/model.safetensors") for folder in (f"{tmp_path}/run/huggingface", model))
    assert not trained["lm_head.weight"].float().equal(start["lm_head.weight"])
