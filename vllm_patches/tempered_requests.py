"""Reads and checks requests to vLLM that opt in to HAPO's adaptive temperature.

A request opts in through `SamplingParams.extra_args`:

    {"adaptive_temperature": {"temperature_tau": 0.05, "median": -3.1, "std": 2.2, "scale_pos": 0.5, "scale_neg": 0.2}}

vLLM's V1 model runner serves such requests with the logits processor PROCESSOR, which the engine's config must name.
Its V2 model runner takes no logits processors and serves them with `v2_adaptive_temperature`. An exception inside a
runner ends the engine, so the process that receives requests checks them before the engine sees them.
"""

import functools
import math
from collections.abc import Mapping
from types import ModuleType

from vllm_patches.after_import import after_import

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


def refuse_wrong_requests() -> None:
    """Wrap `InputProcessor._validate_params`, with which vLLM 0.24 and 0.30 check every request, to check settings too.
    The wrapper raises ValueError for wrong settings, and for an engine that cannot serve them (`can_temper`). This can
    go when vLLM lets an engine name a check of `extra_args` without naming a logits processor."""
    after_import("vllm.v1.engine.input_processor", _wrap_validation)


def _wrap_validation(module: ModuleType) -> None:
    input_processor = module.InputProcessor
    validate = input_processor._validate_params
    if hasattr(validate, "__wrapped__"):
        return

    @functools.wraps(validate)
    def validate_settings(self, params, supported_tasks):
        validate(self, params, supported_tasks)
        if not hasattr(params, "extra_args") or read_settings(params) is None:
            return
        if "can_temper" not in vars(self):  # the runner is fixed, and asking vLLM for it takes milliseconds
            self.can_temper = can_temper(self.vllm_config)
        if not self.can_temper:
            raise ValueError(
                f"extra_args[{KEY!r}]: this engine has vLLM's V1 model runner, which needs the logits processor "
                f"{PROCESSOR}: name it in actor_rollout_ref.rollout.engine_kwargs.vllm.logits_processors"
            )

    input_processor._validate_params = validate_settings


def can_temper(vllm_config) -> bool:
    """Return whether an engine can serve opted-in requests: it names the processor, or has the V2 runner."""
    named = str(vllm_config.model_config.logits_processors)  # names, or classes if set in Python
    return PROCESSOR.partition(":")[2] in named or vllm_config.use_v2_model_runner
