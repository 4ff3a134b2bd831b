"""Candidates of group rollouts come without text; everybody else's log-probabilities keep it."""

from types import SimpleNamespace

from vllm import SamplingParams
from vllm.v1.engine.logprobs import LogprobsProcessor

from vllm_patches.candidates_without_text import leave_out_text


def test_only_flat_log_probabilities_lose_their_text():
    leave_out_text()
    leave_out_text()  # as often as it is called
    tokenizer = object()
    for flat in (True, False):
        request = SimpleNamespace(sampling_params=SamplingParams(logprobs=3, flat_logprobs=flat))
        assert LogprobsProcessor.from_new_request(tokenizer, request).tokenizer is (None if flat else tokenizer)
        # vLLM itself decodes both; if it does not any more, the patch can go
        unpatched = LogprobsProcessor.from_new_request.__func__.__wrapped__
        assert unpatched(LogprobsProcessor, tokenizer, request).tokenizer is tokenizer
