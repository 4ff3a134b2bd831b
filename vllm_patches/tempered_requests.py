"""Reads and checks requests to vLLM that opt in to HAPO's adaptive temperature.

A request opts in through `SamplingParams.extra_args`:

    {"adaptive_temperature": {"temperature_tau": 0.05, "median": -3.1, "std": 2.2, "scale_pos": 0.5, "scale_neg": 0.2}}

The logits processor PROCESSOR serves such requests, and the engine's config must name it. An exception inside a runner
ends the engine, so vLLM lets the processor check each request (`validate_params`) before the engine sees it.
"""

import math
from collections.abc import Mapping

KEY = "adaptive_temperature"
SETTINGS = ("temperature_tau", "median", "std", "scale_pos", "scale_neg")
PROCESSOR = "vllm_patches.v1_adaptive_temperature:AdaptiveTemperature"
ENTROPY_FLOOR = 1e-6  # in nats; if one token is certain, the entropy is 0, which has no logarithm


def read_settings(sampling_params) -> tuple[float, ...] | None:
    """Return the request's settings in the order of SETTINGS; None if the request has not opted in, or the settings
    change nothing, because temperature_tau or the temperature is 0."""
    settings = (sampling_params.extra_args or {}).get(KEY)
    if settings is None:
        return None
    if not isinstance(settings, Mapping) or set(settings) != set(SETTINGS):
        raise ValueError(f"extra_args[{KEY!r}] must hold exactly {', '.join(SETTINGS)}; got {settings!r}")
    values = tuple(float(settings[name]) for name in SETTINGS)
    tau, median, *positive = values
    if not (0 <= tau < 1 and math.isfinite(median) and all(0 < value < math.inf for value in positive)):
        raise ValueError(
            f"extra_args[{KEY!r}]: temperature_tau in [0, 1), a finite median, std and scales above 0; got {settings!r}"
        )
    return None if tau == 0 or sampling_params.temperature == 0 else values
