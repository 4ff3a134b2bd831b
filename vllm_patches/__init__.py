"""What this project changes inside vLLM: 0.24 on GPUs, 0.30 on CPU.

`register` runs in every vLLM process (`vllm.general_plugins`). Each change lives in its own module, named after what it
fixes, and says when it applies. `candidates_without_text` is applied by the server that needs it
(`verl/workers/rollout/candidate_server.py`), on GPUs too. scripts/check_vllm_names.py checks what all of them use.
"""

import os

from vllm_patches import cpu_version_name

__all__ = ["cpu_version_name", "register"]


def register() -> None:
    """Apply the patches that this process asks for; without VERL_PLATFORM=cpu that is none."""
    if os.environ.get("VERL_PLATFORM", "").strip().lower() != "cpu":
        return
    from vllm_patches import cpu_seeded_requests, cpu_weight_reload

    cpu_version_name.install()
    cpu_weight_reload.keep_linear_weights_loadable()
    cpu_seeded_requests.rewind_discarded_samples()
