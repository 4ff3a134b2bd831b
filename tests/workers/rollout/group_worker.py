"""A worker of group rollouts as Ray's actor makes it, without TransferQueue."""

from types import SimpleNamespace

import pytest

from tests.configs import composed
from verl.trainer.ppo.v1 import agent_loop_tq
from verl.workers.rollout.group_rollout import GroupAgentLoopWorker

Worker = GroupAgentLoopWorker.__ray_metadata__.modified_class


def make_worker(monkeypatch: pytest.MonkeyPatch, model_folder: str, reward_workers: list, *overrides: str):
    """Return a worker that grows no trees, for a model's folder, objects that are called as the handles of reward
    workers are, and overrides of the config `explore`."""
    monkeypatch.setattr(agent_loop_tq.tq, "init", lambda: None)
    model = f"actor_rollout_ref.model.path={model_folder}"
    config = composed("explore", "hardware=cpu", model, *overrides)
    return Worker(config, SimpleNamespace(), reward_loop_worker_handles=reward_workers)
