"""HAPO's adaptive temperature (arXiv 2509.16591, section 3.1) as a logits processor of vLLM's V1 sampler.

A request opts in through `SamplingParams.extra_args` (`vllm_patches/tempered_requests.py`). At each of its decode steps
H is the entropy of the raw logits, h its normalized value under the request's statistics, and the token is sampled at
T' = T (1 + temperature_tau h). All other requests, and greedy ones, are left unchanged.

This module patches nothing in vLLM; a run's config names the processor (`verl/workers/config/sampler_choice.py`). It
relies on vLLM 0.24 and 0.30 falling back to their V1 model runner for an engine that names a logits processor
(`VllmConfig._get_v2_model_runner_unsupported_features`), and on `SamplingParams.verify`, which lets each named
processor check a request.
"""

import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from vllm_patches.entropy_temperature import compute_entropy_based_temperature
from vllm_patches.tempered_requests import SETTINGS, read_settings


class AdaptiveTemperature(LogitsProcessor):
    """Logits processor that divides the logits of opted-in requests by T'/T; the sampler then divides all by T."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        read_settings(sampling_params)

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool):
        self.device, self.is_pin_memory = device, is_pin_memory
        self.requests: dict[int, tuple[float, ...]] = {}
        self.rows = torch.empty(0, dtype=torch.long, device=device)
        self.settings = torch.empty(len(SETTINGS), 0, device=device)

    def is_argmax_invariant(self) -> bool:
        """Return False, so that vLLM applies the temperature after this processor: H is the raw logits' entropy."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if process_dict_updates(self.requests, batch_update, lambda params, _, __: read_settings(params)):
            rows = sorted(self.requests)
            columns = list(zip(*(self.requests[row] for row in rows), strict=True)) or [()] * len(SETTINGS)
            self.rows = self._to_device(rows, torch.long)
            self.settings = self._to_device(columns, torch.float32)

    def _to_device(self, values: list, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor on the device; pinned memory lets the engine continue during the copy."""
        return torch.tensor(values, dtype=dtype, pin_memory=self.is_pin_memory).to(self.device, non_blocking=True)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if not self.requests:
            return logits
        settings = dict(zip(SETTINGS, self.settings, strict=True))
        if len(self.requests) == len(logits):
            return logits.div_(compute_entropy_based_temperature(logits, **settings).unsqueeze(-1))
        tempered = logits[self.rows]
        tempered.div_(compute_entropy_based_temperature(tempered, **settings).unsqueeze(-1))
        return logits.index_copy_(0, self.rows, tempered)
