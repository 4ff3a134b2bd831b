"""Faults in a running process of a run, from the moment on when a file exists.

    VERL_USE_EXTERNAL_MODULES=injected_faults FAULT="reward function hangs" FAULT_FILE=/tmp/fault

Every process of the run imports this module with verl, or is a fork of one that has.
"""

import functools
import inspect
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

from vllm_patches.after_import import after_import


def hang(_) -> None:
    time.sleep(3600)


def fail(_) -> None:
    raise ValueError("injected fault")


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


FSDP = "verl.workers.engine.fsdp.transformer_impl"
VLLM = "verl.workers.rollout.vllm_rollout.utils"
REWARDS = "verl.experimental.reward_loop.reward_manager.length_aware"
# name -> module, class and method, and what takes the method's place
FAULTS = {
    "reward function hangs": (REWARDS, "LengthAwareRewardManager", "run_single", hang),
    "vLLM's engine takes no weights": (VLLM, "vLLMColocateWorkerExtension", "update_weights_from_ipc", fail),
    "vLLM's engine has weights of NaN": (VLLM, "vLLMColocateWorkerExtension", "_update_weights", spoil_weights),
    "gradients are NaN": (FSDP, "FSDPEngine", "optimizer_step", skip_update),
    "an update makes a weight infinite": (FSDP, "FSDPEngine", "optimizer_step", spoil_update),
}


def faulty(method: Callable, name: str, fault: Callable) -> Callable:
    """Return the method with the fault in its place once the file exists, in a run of this fault."""

    def is_there() -> bool:
        return os.environ.get("FAULT") == name and Path(os.environ["FAULT_FILE"]).exists()

    @functools.wraps(method)
    def call(self, *args, **kwargs):
        return fault(self) if is_there() else method(self, *args, **kwargs)

    @functools.wraps(method)
    async def call_later(self, *args, **kwargs):
        return fault(self) if is_there() else await method(self, *args, **kwargs)

    return call_later if inspect.iscoroutinefunction(method) else call


def inject(name: str, class_name: str, method_name: str, fault: Callable, module) -> None:
    owner = getattr(module, class_name)
    setattr(owner, method_name, faulty(getattr(owner, method_name), name, fault))


for name, (module_name, *what) in FAULTS.items():
    after_import(module_name, functools.partial(inject, name, *what))
