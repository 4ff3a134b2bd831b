"""Candidates of group rollouts come without text; everybody else's log-probabilities keep it."""

from types import SimpleNamespace

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists

from vllm_patches.top_logprobs_without_text import leave_out_text


def test_only_flat_log_probabilities_lose_their_text():
    leave_out_text()
    leave_out_text()  # a second call changes nothing
    tokenizer = object()
    for flat in (True, False):
        request = SimpleNamespace(sampling_params=SamplingParams(logprobs=3, flat_logprobs=flat))
        assert LogprobsProcessor.from_new_request(tokenizer, request).tokenizer is (None if flat else tokenizer)
        # vLLM itself decodes both; if it does not any more, the patch can go
        unpatched = LogprobsProcessor.from_new_request.__func__.__wrapped__
        assert unpatched(LogprobsProcessor, tokenizer, request).tokenizer is tokenizer


@pytest.mark.parametrize("n", [0, 3])
def test_the_numbers_are_vllms_own(n):
    leave_out_text()
    request = SimpleNamespace(sampling_params=SamplingParams(logprobs=n, flat_logprobs=True))
    ours = LogprobsProcessor.from_new_request(None, request)
    vllms = LogprobsProcessor.from_new_request.__func__.__wrapped__(LogprobsProcessor, None, request)
    for step in range(5):
        # vLLM's number of candidates is the largest that a request of the batch asks for
        ids, values = np.arange(4)[None] + step, -np.arange(4.0)[None]
        for processor in (ours, vllms):
            processor._update_sample_logprobs(LogprobsLists(ids, values, np.array([step + 1])))
    assert list(ours.logprobs) == list(vllms.logprobs) and len(ours.logprobs) == 5
    for name in ("token_ids", "logprobs", "ranks", "decoded_tokens", "start_indices", "end_indices"):
        assert getattr(ours.logprobs, name) == getattr(vllms.logprobs, name)


def test_parts_are_joined_to_the_whole_also_where_the_chosen_token_is_among_the_likely_ones():
    leave_out_text()
    request = SimpleNamespace(sampling_params=SamplingParams(logprobs=2, flat_logprobs=True))
    whole = LogprobsProcessor.from_new_request(None, request)
    for step in range(4):
        ids, values = np.array([[7, 7, 5 + step]]), np.array([[-0.5, -0.5, -1.0]])
        whole._update_sample_logprobs(LogprobsLists(ids, values, np.array([1])))
    joined = whole.logprobs[:1]
    joined.extend(whole.logprobs[1:])
    joined.extend(type(joined)())
    assert vars(joined) == vars(whole.logprobs) and len(joined.token_ids) == 4 * 3
