"""Faults in a running process of a run: it raises, hangs, or returns nonsense from the moment on when a file exists.

    VERL_USE_EXTERNAL_MODULES=injected_faults FAULT="reward function" FAULT_HOW=hangs FAULT_FILE=/tmp/fault

Every process of the run imports this module with verl, and the one that has the place changes one of its methods.
"""

import functools
import inspect
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_patches.after_import import after_import


@dataclass(frozen=True)
class Place:
    """A method in which a fault can be, and what it returns as nonsense."""

    module: str
    owner: str
    method: str
    nonsense: Any = None


def skip_update(engine) -> float:
    """Do what upstream does where gradients are NaN: skip the update, and return the norm."""
    engine.optimizer.zero_grad()
    return math.nan


def spoil_weights(worker) -> None:
    """Make the weights of vLLM's model NaN, as a broken transfer does."""
    for weight in worker.model_runner.model.parameters():
        weight.data.fill_(math.nan)


def spoil_update(engine) -> float:
    """Make a weight infinite in an update whose gradients are finite."""
    next(engine.module.parameters())._local_tensor.data.view(-1)[0] = math.inf
    return 1.0


REWARDS = "verl.experimental.reward_loop.reward_manager.length_aware"
STORAGE = "transfer_queue.storage.simple_storage"
PLACES = {
    "reward function": Place(REWARDS, "LengthAwareRewardManager", "run_single", {"reward_score": math.nan}),
    "rollout": Place("verl.workers.rollout.tree_rollout", "TreeRollout", "run", ["no trajectory"]),
    "vLLM's server": Place(
        "verl.workers.rollout.vllm_rollout.vllm_async_server", "vLLMHttpServer", "generate", "nonsense"
    ),
    "vLLM's engine, a step": Place("vllm.v1.engine.core", "EngineCore", "step", "nonsense"),
    "vLLM's engine, new weights": Place(
        "verl.workers.rollout.vllm_rollout.utils", "vLLMColocateWorkerExtension", "update_weights_from_ipc", "nonsense"
    ),
    "vLLM's engine, values of the weights": Place(
        "verl.workers.rollout.vllm_rollout.utils", "vLLMColocateWorkerExtension", "_update_weights", spoil_weights
    ),
    "load balancer": Place("verl.workers.rollout.router", "GlobalRequestLoadBalancer", "acquire_server", "nonsense"),
    "FSDP worker, log-probabilities": Place("verl.workers.engine_workers", "TrainingWorker", "infer_batch", "nonsense"),
    "FSDP worker, update": Place("verl.workers.engine_workers", "TrainingWorker", "train_mini_batch", "nonsense"),
    "FSDP worker, gradients": Place(
        "verl.workers.engine.fsdp.transformer_impl", "FSDPEngine", "optimizer_step", skip_update
    ),
    "FSDP worker, values of the weights": Place(
        "verl.workers.engine.fsdp.transformer_impl", "FSDPEngine", "optimizer_step", spoil_update
    ),
    "FSDP worker, checkpoint": Place(
        "verl.workers.engine.fsdp.transformer_impl", "FSDPEngine", "save_checkpoint", None
    ),
    "TransferQueue's storage": Place(STORAGE, "StorageUnitData", "get_data", {}),
    "TransferQueue's controller": Place(
        "transfer_queue.controller", "TransferQueueController", "kv_retrieve_meta", None
    ),
    "TaskRunner": Place("verl.trainer.ppo.v1.watched_run", "WatchedRun", "_compute_advantage", None),
}


def begin() -> None:
    """Hang, or raise, where the environment says so."""
    how = os.environ["FAULT_HOW"]
    if how == "hangs":
        time.sleep(3600)
    if how == "raises":
        raise ValueError("injected fault")
    if how == "exits":
        raise SystemExit(3)


def faulty(method: Callable, nonsense: Any) -> Callable:
    """Return the method with the fault."""
    there = Path(os.environ["FAULT_FILE"]).exists

    def result(owner) -> Any:
        begin()
        return nonsense(owner) if callable(nonsense) else nonsense

    @functools.wraps(method)
    def call(self, *args, **kwargs):
        return result(self) if there() else method(self, *args, **kwargs)

    @functools.wraps(method)
    async def call_later(self, *args, **kwargs):
        return result(self) if there() else await method(self, *args, **kwargs)

    return call_later if inspect.iscoroutinefunction(method) else call


if name := os.environ.get("FAULT"):
    place = PLACES[name]

    def inject(module) -> None:
        """Change the method, also of an actor's class, which Ray keeps behind a remote one."""
        owner = getattr(module, place.owner)
        metadata = getattr(owner, "__ray_metadata__", None)
        owner = metadata.modified_class if metadata else owner
        setattr(owner, place.method, faulty(getattr(owner, place.method), place.nonsense))

    after_import(place.module, inject)
