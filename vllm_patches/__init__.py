"""The changes that this project makes inside vLLM (0.24 on GPUs, 0.30 on CPU).

vLLM calls `register` in each of its processes (`vllm.general_plugins`). Each change has its own module, whose name and
docstring say what it does and when it applies. The server that needs `top_logprobs_without_text`
(`verl/workers/rollout/engines/top_logprobs_server.py`) applies it itself, also on GPUs.
"""

import os

from vllm_patches import cpu_version_name

__all__ = ["cpu_version_name", "register"]


def register() -> None:
    """Apply the patches for the CPU if VERL_PLATFORM=cpu."""
    if os.environ.get("VERL_PLATFORM", "").strip().lower() != "cpu":
        return
    from vllm_patches import cpu_adapter_names, cpu_seeded_requests, cpu_weight_reload

    cpu_version_name.install()
    cpu_adapter_names.keep_the_mappers_old_name()
    cpu_weight_reload.keep_linear_weights_loadable()
    cpu_seeded_requests.adapt_sampling()
