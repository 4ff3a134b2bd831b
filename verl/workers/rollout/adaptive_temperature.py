"""HAPO's adaptive temperature (arXiv 2509.16591, section 3.1) as a logits processor of vLLM's V1 sampler.

A request asks for it in `SamplingParams.extra_args`:

    {"adaptive_temperature": {"temperature_tau": 0.05, "median": -3.1, "std": 2.2, "scale_pos": 0.5, "scale_neg": 0.2}}

At each of its decode steps H is the entropy of the raw logits, h its normalised value under those statistics, and the
token is sampled at T' = T (1 + temperature_tau h). Requests that do not ask, and greedy ones, are not touched.

The run's config names it, so that no other vLLM of the environment changes:
`engine_kwargs.vllm.logits_processors=[verl.workers.rollout.adaptive_temperature:AdaptiveTemperature]`. It replaces
nothing of vLLM's. vLLM's newer model runner (V2) takes no logits processors; for such an engine vLLM itself chooses the
V1 runner and says so.
"""

from collections.abc import Mapping

import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from verl.trainer.ppo.normalized_entropy import compute_entropy_based_temperature

KEY = "adaptive_temperature"
SETTINGS = ("temperature_tau", "median", "std", "scale_pos", "scale_neg")


def read_settings(sampling_params: SamplingParams) -> tuple[float, ...] | None:
    """The request's settings in the order of SETTINGS; None when it samples the ordinary way.

    Raises:
        ValueError: a setting is missing, unknown, or out of range.
    """
    settings = (sampling_params.extra_args or {}).get(KEY)
    if settings is None:
        return None
    if not isinstance(settings, Mapping) or set(settings) != set(SETTINGS):
        raise ValueError(f"extra_args[{KEY!r}] must hold exactly {', '.join(SETTINGS)}; got {settings!r}")
    values = tuple(float(settings[name]) for name in SETTINGS)
    tau, _, std, scale_pos, scale_neg = values
    if not 0 <= tau < 1 or not min(std, scale_pos, scale_neg) > 0:
        raise ValueError(f"extra_args[{KEY!r}]: temperature_tau in [0, 1), std and scales above 0; got {settings!r}")
    return None if tau == 0 or sampling_params.temperature == 0 else values


class AdaptiveTemperature(LogitsProcessor):
    """Divides the logits of the requests that ask by T'/T; the sampler then divides all by T."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        read_settings(sampling_params)

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool):
        self.device = device
        self.requests: dict[int, tuple[float, ...]] = {}
        self.rows = torch.empty(0, dtype=torch.long, device=device)
        self.settings = torch.empty(len(SETTINGS), 0, device=device)

    def is_argmax_invariant(self) -> bool:
        """False: vLLM would call it after the temperature, and H is of the raw logits."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if process_dict_updates(self.requests, batch_update, lambda params, _, __: read_settings(params)):
            rows = sorted(self.requests)
            self.rows = torch.tensor(rows, dtype=torch.long, device=self.device)
            settings = torch.tensor([self.requests[row] for row in rows], dtype=torch.float32).reshape(
                -1, len(SETTINGS)
            )
            self.settings = settings.T.contiguous().to(self.device)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if not self.requests:
            return logits
        settings = dict(zip(SETTINGS, self.settings, strict=True))
        if len(self.requests) == len(logits):
            return logits.div_(compute_entropy_based_temperature(logits, **settings).unsqueeze(-1))
        asking = logits[self.rows]
        asking.div_(compute_entropy_based_temperature(asking, **settings).unsqueeze(-1))
        return logits.index_copy_(0, self.rows, asking)
