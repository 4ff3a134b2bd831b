"""Hooks this repository into upstream verl, which loads it through the entry point `verl.plugins`.

Importing `verl` in any process (driver, Ray worker, vLLM worker) imports this module. It
1. makes the files under `verl/` importable for which upstream has no module of the same name,
2. registers losses, estimators, trainers and rollouts when upstream's module with the registry has been imported,
3. activates the CPU platform if VERL_PLATFORM=cpu.
It must stay cheap, so that it imports no torch, ray or vllm itself. It must also fail loudly: upstream swallows a
plugin's exceptions, and therefore a failure here is a BaseException, which upstream does not catch.
"""

import importlib
import os
import sys
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from vllm_patches.after_import import after_import

OVERLAY_DIR = Path(__file__).resolve().parent / "verl"


class OverlayError(BaseException):
    """The plugin could not be loaded. This is not an `Exception`, as verl 0.9.1 logs those at DEBUG and continues."""


class OverlayFinder:
    """Finds `verl.*` modules that upstream lacks. It is the last in `sys.meta_path`, so that upstream wins."""

    @staticmethod
    def find_spec(fullname: str, path=None, target=None) -> ModuleSpec | None:
        package, *parents_and_name = fullname.split(".")
        if package != "verl" or not parents_and_name:
            return None
        return PathFinder.find_spec(fullname, [str(OVERLAY_DIR.joinpath(*parents_and_name[:-1]))])


# rollout names whose replicas are vLLM servers that report candidates
CANDIDATE_ROLLOUTS = ("kt", "over_generation", "hato")


def _register_replicas(replica: ModuleType) -> None:
    def load():
        return importlib.import_module("verl.workers.rollout.candidate_server").CandidateReplica

    names = (*CANDIDATE_ROLLOUTS, "vllm") if os.environ.get("VERL_SHARED_CALLS") == "1" else CANDIDATE_ROLLOUTS
    for name in names:
        replica.RolloutReplicaRegistry.register(name, load)


def _register_server_adapters(base: ModuleType) -> None:
    """verl 0.9.1 keeps the trainer's side of a rollout in a module-level dictionary without a register function."""
    for name in CANDIDATE_ROLLOUTS:
        base._ROLLOUT_REGISTRY[(name, "async")] = base._ROLLOUT_REGISTRY[("vllm", "async")]
    # ARPO's authors call rollouts with tools a mode
    base._ROLLOUT_REGISTRY[("vllm", "sync_with_tool")] = base._ROLLOUT_REGISTRY[("vllm", "async")]


def _register_algorithms(core_algos: ModuleType) -> None:
    """Losses, and the advantage estimators of every `*_credit.py` beside them."""
    credits = sorted(file.stem for file in OVERLAY_DIR.joinpath("trainer/ppo").glob("*_credit.py"))
    for name in ("hapo_algos", "aepo_algos", "hato_algos", *credits):
        importlib.import_module(f"verl.trainer.ppo.{name}")


def _register_trainers(_: ModuleType) -> None:
    for name in ("explore_trainer", "asynchronous_trainers"):
        importlib.import_module(f"verl.trainer.ppo.v1.{name}")


def _leave_missing_gpus_to_the_watch(base: ModuleType) -> None:
    importlib.import_module("verl.trainer.cluster_watch").leave_missing_gpus_to_the_watch(base)


def _report_engine_deaths(server: ModuleType) -> None:
    importlib.import_module("verl.trainer.death_watch").report_engine_deaths(server)


def _repair_weight_transfer(transfer: ModuleType) -> None:
    importlib.import_module("verl.workers.rollout.weight_sockets").keep_runs_apart(transfer)
    # after the sockets' names, as it looks for the call by the name that the adapter uses
    importlib.import_module("verl.workers.rollout.weight_answers").watch_answers(transfer)


def _remember_weight_calls(vllm_rollout: ModuleType) -> None:
    importlib.import_module("verl.workers.rollout.weight_answers").remember_calls(vllm_rollout)


def _guard_rewards(reward_loop: ModuleType) -> None:
    importlib.import_module("verl.experimental.reward_loop.guarded_rewards").guard_rewards(reward_loop)


def _find_equal_rewards(replay_buffer: ModuleType) -> None:
    importlib.import_module("verl.trainer.ppo.v1.exact_spread").find_equal_rewards(replay_buffer)


def _begin_epochs_after_checkpoints(handler: ModuleType) -> None:
    importlib.import_module("verl.utils.checkpoint.epoch_ends").begin_epochs_after_checkpoints(handler)


def _save_copies_of_parameters(fsdp_utils: ModuleType) -> None:
    importlib.import_module("verl.utils.parameter_copies").save_copies(fsdp_utils)


def activate_cpu() -> None:
    """Make CPU the platform of this process and of those that it starts; calling it again does nothing."""
    from verl.plugin.platform import platform_cpu

    if platform_cpu.make_current():
        for module_name, repair in platform_cpu.REPAIRS.items():
            after_import(module_name, repair)


@cache
def register() -> None:
    """Hook the overlay into this process; calling it again does nothing.

    Raises:
        OverlayError: with the cause, for any failure.
    """
    try:
        if not (OVERLAY_DIR / "__init__.py").exists():  # a wheel puts the files into upstream's own folder
            sys.meta_path.append(OverlayFinder)
        after_import("verl.trainer.ppo.core_algos", _register_algorithms)
        after_import("verl.trainer.ppo.v1", _register_trainers)
        after_import("verl.workers.engine", lambda _: importlib.import_module("verl.workers.engine.prefix_tree.engine"))
        after_import("verl.workers.rollout.replica", _register_replicas)
        after_import("verl.workers.rollout.base", _register_server_adapters)
        after_import("verl.workers.rollout.vllm_rollout.vllm_async_server", _report_engine_deaths)
        after_import("verl.workers.rollout.vllm_rollout.bucketed_weight_transfer", _repair_weight_transfer)
        after_import("verl.workers.rollout.vllm_rollout.vllm_rollout", _remember_weight_calls)
        after_import("verl.experimental.reward_loop.reward_loop", _guard_rewards)
        after_import("verl.trainer.ppo.v1.replay_buffer", _find_equal_rewards)
        after_import("verl.utils.checkpoint.checkpoint_handler", _begin_epochs_after_checkpoints)
        after_import("verl.utils.fsdp_utils", _save_copies_of_parameters)
        if os.environ.get("VERL_WAIT_FOR_NODES") == "1":
            after_import("verl.single_controller.ray.base", _leave_missing_gpus_to_the_watch)
        if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
            activate_cpu()
    except Exception as error:
        raise OverlayError(f"the verl plugin 'exploration_recipes' failed: {error!r}") from error


register()  # upstream loads the entry point but does not call it
