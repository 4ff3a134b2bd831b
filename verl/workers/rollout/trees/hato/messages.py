"""What HATO's trainer and rollout send each other; imported by both, so without either.

With the prompts: `SETTINGS`, a dictionary with step, temperature and value_model (packed), and `MAX_NODES`, the nodes
that a prompt's tree may have. Back in extra_fields of a prompt's first row: `HATO_STEPS`, {"segments", "features",
"values"}, of every step that was kept its segment's id, what the value model saw, and V. `STEP_INFO`: in the extra_info
of a step that the reward loop scores, {"before", "step"}, texts.
"""

import io

import torch

SETTINGS, MAX_NODES = "hato_settings", "hato_max_nodes"
HATO_STEPS = "hato_steps"
STEP_INFO = "hato_step"


def pack(state: dict) -> bytes:
    """A value model's state, to send along."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def unpack(packed: bytes) -> dict:
    return torch.load(io.BytesIO(packed), weights_only=True)
