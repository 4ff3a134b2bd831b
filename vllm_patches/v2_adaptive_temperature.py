"""Adds HAPO's adaptive temperature to the sampler of vLLM's V2 model runner, which takes no logits processors.

It is for vLLM 0.24 and 0.30. Each request's settings lie beside its temperature in `SamplingStates`, and one kernel
divides each row by T' = T (1 + temperature_tau h), where h in [-1, 1] is the row's normalized entropy
(`tempering_kernel`). It is computed from the logits after biases, penalties and forbidden words; in the V1 runner from
the logits before penalties. All later steps, and processed log-probabilities,
see the tempered logits. A batch without opted-in requests takes vLLM's own path.

This can go when the V2 runner takes logits processors.
"""

import functools
from types import ModuleType

from vllm_patches.after_import import after_import
from vllm_patches.tempered_requests import SETTINGS, read_settings

STD = SETTINGS.index("std")  # above 0 in the settings of every opted-in request


def temper_v2_sampler() -> None:
    """Let vLLM's `SamplingStates` and `Sampler` temper requests that opt in, once the V2 runner imports them."""
    after_import("vllm.v1.worker.gpu.sample.states", _wrap_states)
    after_import("vllm.v1.worker.gpu.sample.sampler", _wrap_sampler)


def _wrap_states(module: ModuleType) -> None:
    """Let `SamplingStates` store the settings of each slot, and apply them together with the temperature."""
    import torch

    states = module.SamplingStates
    init, add, write, apply = states.__init__, states.add_request, states.apply_staged_writes, states.apply_temperature
    if hasattr(add, "__wrapped__"):
        return

    @functools.wraps(init)
    def init_with_settings(self, max_num_reqs, vocab_size):
        init(self, max_num_reqs, vocab_size)
        self.tempering = module.UvaBackedTensor((max_num_reqs, len(SETTINGS)), dtype=torch.float32)

    @functools.wraps(add)
    def add_with_settings(self, req_idx, sampling_params):
        add(self, req_idx, sampling_params)
        self.tempering.np[req_idx] = read_settings(sampling_params) or 0.0  # 0 clears the last request's settings

    @functools.wraps(write)
    def write_with_settings(self):
        write(self)
        self.tempering.copy_to_uva()

    @functools.wraps(apply)
    def apply_adaptive_temperature(self, logits, expanded_idx_mapping, idx_mapping_np):
        if not self.tempering.np[idx_mapping_np, STD].any():
            return apply(self, logits, expanded_idx_mapping, idx_mapping_np)
        from vllm_patches.tempering_kernel import divide_by_temperature

        divide_by_temperature(logits, expanded_idx_mapping, self.temperature.gpu, self.tempering.gpu)

    states.__init__, states.add_request = init_with_settings, add_with_settings
    states.apply_staged_writes, states.apply_temperature = write_with_settings, apply_adaptive_temperature


def _wrap_sampler(module: ModuleType) -> None:
    """Let `Sampler` process the rows of opted-in requests: vLLM 0.30 skips a batch of plain rows at temperature 1."""
    add = module.Sampler.add_request
    if hasattr(add, "__wrapped__"):
        return

    @functools.wraps(add)
    def add_and_mark(self, req_idx, prompt_len, sampling_params):
        add(self, req_idx, prompt_len, sampling_params)
        # vLLM 0.24 has no such marks and processes every batch
        if hasattr(self, "needs_logits_processing") and self.sampling_states.tempering.np[req_idx, STD]:
            self.needs_logits_processing[req_idx] = True

    module.Sampler.add_request = add_and_mark
