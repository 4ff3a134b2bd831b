"""A rollout server as Ray's actor makes it, for tests that give it an engine of their own."""

from types import SimpleNamespace

import pytest
import ray

from vllm_patches import cpu_version_name

cpu_version_name.install()  # upstream's server module asks for vLLM's version
from verl.workers.rollout.replica import RolloutMode  # noqa: E402

from verl.workers.config import HFModelConfig, RolloutConfig  # noqa: E402
from verl.workers.rollout.engines.top_logprobs_server import TopLogprobsServer  # noqa: E402

# variables that the constructor sets for the processes that it starts
VARIABLES = ("CUDA_VISIBLE_DEVICES", "VERL_REPLICA_RANK", "VERL_RAY_JOB_ID")


def make_server(monkeypatch: pytest.MonkeyPatch, model_folder: str, **rollout) -> TopLogprobsServer:
    """Return a server for a response of at most 448 tokens, without Ray; `rollout` are further keys of its config."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "")
    context = SimpleNamespace(get_job_id=lambda: "01000000")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    config = RolloutConfig(name="vllm", max_model_len=512, prompt_length=64, response_length=448, **rollout)
    ranks = {"replica_rank": 0, "node_rank": 0, "gpus_per_node": 1, "nnodes": 1}
    model = HFModelConfig(path=model_folder)
    return TopLogprobsServer(config, model, RolloutMode.HYBRID, workers=[], cuda_visible_devices="", **ranks)
