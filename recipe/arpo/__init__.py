"""ARPO (arXiv 2507.19849) and AEPO (arXiv 2510.14545): tool-use rollouts that fork where the model is uncertain.

Imported by every verl process of a run (VERL_USE_EXTERNAL_MODULES in the recipe's YAML).
"""

import importlib

from verl_overlay import after_import


def _serve_candidates(replica) -> None:
    """rollout.name is vllm, as in the authors' configs; the entropies after tool results need its candidates."""
    load = lambda: importlib.import_module("verl.workers.rollout.candidate_server").CandidateReplica  # noqa: E731
    replica.RolloutReplicaRegistry.register("vllm", load)


after_import("verl.workers.rollout.replica", _serve_candidates)
after_import("verl.trainer.ppo.v1", lambda _: importlib.import_module("recipe.arpo.arpo_trainer"))
