"""Hooks this repository into upstream verl, which loads it through the entry point `verl.plugins`.

Importing `verl` in any process (driver, Ray worker, vLLM worker) imports this module. It
1. makes those files under `verl/` importable for which upstream has no module of the same name,
2. registers losses, estimators, trainers and rollouts when upstream's module with the registry has been imported,
3. activates the CPU platform if VERL_PLATFORM=cpu.
It must stay cheap, so it imports no torch, ray or vllm itself. It must also fail loudly: upstream catches and hides a
plugin's exceptions, so a failure here is a BaseException, which upstream does not catch.
"""

import importlib
import os
import sys
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from vllm_patches.after_import import after_import

OVERLAY_DIR = Path(__file__).resolve().parents[1] / "verl"


class OverlayError(BaseException):
    """The error of a plugin that failed to load; not an `Exception`, because verl 0.9.1 only logs those at DEBUG."""


class OverlayFinder:
    """Meta-path finder of `verl.*` modules that upstream lacks; it is last in `sys.meta_path`, so upstream wins."""

    @staticmethod
    def find_spec(fullname: str, path=None, target=None) -> ModuleSpec | None:
        package, *parents_and_name = fullname.split(".")
        if package != "verl" or not parents_and_name:
            return None
        return PathFinder.find_spec(fullname, [str(OVERLAY_DIR.joinpath(*parents_and_name[:-1]))])


def _register_replicas(_: ModuleType) -> None:
    """Let vLLM's servers report top log-probs with VERL_SHARED_CALLS=1; our trainers do so themselves."""
    if os.environ.get("VERL_SHARED_CALLS") == "1":
        importlib.import_module("verl.workers.rollout.engines.vllm_server").serve_top_logprobs()


def _register_trainers(_: ModuleType) -> None:
    for name in ("explore_trainer", "asynchronous_trainers"):
        importlib.import_module(f"verl.trainer.ppo.v1.{name}")


# upstream's module, our module in verl_patches, and our function that changes upstream's module
PATCHES = (
    ("verl.workers.rollout.vllm_rollout.vllm_async_server", "engine_deaths", "report_engine_deaths"),
    ("verl.workers.rollout.vllm_rollout.vllm_async_server", "known_adapters", "remember_adapters"),
    ("verl.workers.rollout.vllm_rollout.bucketed_weight_transfer", "weight_transfer", "watch_transfers"),
    ("verl.workers.rollout.vllm_rollout.vllm_rollout", "weight_transfer", "remember_calls"),
    ("verl.experimental.reward_loop.reward_loop", "guarded_rewards", "guard_rewards"),
    ("verl.single_controller.ray.base", "master_ports", "choose_master_ports"),
    ("verl.workers.engine_workers", "named_exits", "report_exits"),
    ("transfer_queue.controller", "named_exits", "report_exits"),
    ("transfer_queue.storage.simple_storage", "named_exits", "report_exits"),
    ("verl.utils.tracking", "hidden_secrets", "hide_secrets"),
    ("verl.trainer.ppo.v1.replay_buffer", "exact_spread", "find_equal_rewards"),
    ("verl.utils.checkpoint.checkpoint_handler", "epoch_ends", "begin_epochs_after_checkpoints"),
    ("verl.utils.fsdp_utils", "parameter_copies", "save_copies"),
    ("verl.workers.engine.base", "finite_weights", "check_updates"),
    ("verl.trainer.ppo.metric_utils", "quick_bootstrap", "compute_at_once"),
)


def _patch_after_import(upstream: str, own: str, function: str) -> None:
    """Import our module and call its function once upstream's module has been imported."""
    after_import(upstream, lambda module: getattr(importlib.import_module(f"verl_patches.{own}"), function)(module))


def activate_cpu() -> None:
    """Make CPU the platform of this process and its children; calling it again does nothing."""
    from verl_patches import platform_cpu

    if platform_cpu.make_current():
        for module_name, repair in platform_cpu.REPAIRS.items():
            after_import(module_name, repair)


@cache
def register() -> None:
    """Hook the overlay into this process; calling it again does nothing. Any failure is an OverlayError."""
    try:
        if not (OVERLAY_DIR / "__init__.py").exists():  # a wheel installs the files into upstream's own folder
            sys.meta_path.append(OverlayFinder)
        # estimators and losses with upstream, and all choices of parts with Hydra
        after_import(
            "verl.trainer.ppo.core_algos", lambda _: importlib.import_module("verl.utils.parts").load_choices()
        )
        after_import("verl.trainer.ppo.v1", _register_trainers)
        after_import("verl.workers.engine", lambda _: importlib.import_module("verl_patches.prefix_tree_engine"))
        after_import("verl.workers.rollout.replica", _register_replicas)
        for patch in PATCHES:
            _patch_after_import(*patch)
        if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
            activate_cpu()
    except Exception as error:
        raise OverlayError(f"the verl plugin 'exploration_recipes' failed: {error!r}") from error


register()  # upstream loads the entry point but does not call it
