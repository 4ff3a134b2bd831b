"""Typed uses of vLLM, which `check_vllm_names.py` gives to a type checker; nothing imports or runs this module.

They stand for the uses that a type checker cannot see in our code, because the objects there have no types: attributes
that our code reads from objects of vLLM's, and functions of vLLM's that it replaces or calls by position.
"""

import torch
from typing_extensions import override
from vllm.config import VllmConfig
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.logprobs import FlatLogprobs
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.v1.worker.gpu.sample import states as v2_states
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.states import SamplingStates
from vllm.v1.worker.gpu_model_runner import GPUModelRunner


def rollout_server(params: SamplingParams, output: RequestOutput, part: CompletionOutput, flat: FlatLogprobs) -> None:
    """Use the fields that top_logprobs_server.py and vllm_server.py access, except those that vLLM 0.24 lacks."""
    _ = params.logprobs, params.prompt_logprobs, params.flat_logprobs, params.detokenize, params.output_kind
    _ = params.temperature, params.top_p, params.top_k, params.repetition_penalty, params.seed, params.max_tokens
    _ = params.stop, params.stop_token_ids, params.skip_special_tokens, params.extra_args
    _ = part.logprobs, part.token_ids, output.outputs, output.add(output, aggregate=True)
    _ = flat.start_indices, flat.end_indices, flat.token_ids, flat.logprobs


def evaluation_server(request: CompletionRequest) -> None:
    """Use the request fields that `ServerEngine` of verl/evaluation/model/server.py sends."""
    _ = request.prompt, request.max_tokens, request.temperature, request.top_p, request.top_k, request.seed
    _ = request.stop, request.stop_token_ids, request.skip_special_tokens, request.return_token_ids
    _ = request.presence_penalty, request.frequency_penalty, request.repetition_penalty, request.min_p


async def local_engine(engine: AsyncLLM, params: SamplingParams) -> None:
    """Use the methods that local_vllm.py calls."""
    engine.generate(sampling_params=params, prompt={"prompt_token_ids": [0]}, request_id="0")
    await engine.reset_prefix_cache()
    engine.shutdown()


class FlatRequests(LogprobsProcessor):
    """Overrides the method that top_logprobs_without_text.py replaces."""

    @override
    @classmethod
    def from_new_request(cls, tokenizer, request: EngineCoreRequest):
        return request.sampling_params


class Validation(InputProcessor):
    """Overrides the method that tempered_requests.py replaces, `_validate_params`."""

    @override
    def _validate_params(self, params, supported_tasks) -> None:
        config: VllmConfig = self.vllm_config
        _ = config.model_config.logits_processors, config.use_v2_model_runner


def adaptive_temperature(processor: LogitsProcessor) -> None:
    """Use the methods that v1_adaptive_temperature.py overrides."""
    _ = processor.validate_params, processor.is_argmax_invariant, processor.update_state, processor.apply


class States(SamplingStates):
    """Overrides the methods that v2_adaptive_temperature.py replaces."""

    @override
    def add_request(self, req_idx, sampling_params) -> None:
        SamplingStates(max_num_reqs=1, vocab_size=1)
        numbers = v2_states.UvaBackedTensor((1, 5), dtype=self.temperature.gpu.dtype)
        _ = numbers.np, numbers.gpu, numbers.copy_to_uva()

    @override
    def apply_staged_writes(self) -> None: ...

    @override
    def apply_temperature(self, logits, expanded_idx_mapping, idx_mapping_np) -> None: ...


class MarkingSampler(Sampler):
    """Overrides the method that v2_adaptive_temperature.py replaces and that vLLM 0.24 has too."""

    @override
    def add_request(self, req_idx, prompt_len, sampling_params) -> None:
        _ = self.sampling_states.temperature


def cpu_patches(runner: GPUModelRunner) -> None:
    """Use the names that cpu_seeded_requests.py wraps or reads, and the function that cpu_weight_reload.py replaces."""
    dispatch_cpu_unquantized_gemm(layer=torch.nn.Linear(1, 1), remove_weight=True)
    _ = runner._bookkeeping_sync, runner.discard_request_mask.np
    _ = runner.input_batch.generators, runner.input_batch.num_reqs


class SeededSampler(TopKTopPSampler):
    """Overrides the methods that cpu_seeded_requests.py replaces and calls."""

    @override
    def forward_cpu(self, logits, generators, k, p): ...

    @override
    def forward_native(self, logits, generators, k, p): ...
