"""What ARPO's runs register, in every verl process (VERL_USE_EXTERNAL_MODULES in the recipe's YAML).

A module of its own: the recipe's data tools are imported without it.
"""

import importlib

from verl_overlay import after_import


def _serve_candidates(replica) -> None:
    """rollout.name is vllm, as in the authors' configs; the entropies after tool results need its candidates."""
    load = lambda: importlib.import_module("verl.workers.rollout.candidate_server").CandidateReplica  # noqa: E731
    replica.RolloutReplicaRegistry.register("vllm", load)


after_import("verl.workers.rollout.replica", _serve_candidates)
