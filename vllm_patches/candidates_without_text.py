"""Gives requests the log-probabilities of many tokens without decoding the tokens' text, on vLLM 0.24 and 0.30.

vLLM decodes the text of every candidate token of every step in Python, in the process that serves all requests. It does
so unless a request's own text is not decoded either, and stop texts need that text. With this change, requests that ask
for `flat_logprobs`, as rollouts that branch do, get ids and numbers only. It can go when a request can ask for this.
"""

import functools


def leave_out_text() -> None:
    """Wrap `LogprobsProcessor.from_new_request`."""
    from vllm.v1.engine.logprobs import LogprobsProcessor

    made = LogprobsProcessor.from_new_request.__func__
    if hasattr(made, "__wrapped__"):
        return

    @functools.wraps(made)
    def from_new_request(cls, tokenizer, request):
        return made(cls, None if request.sampling_params.flat_logprobs else tokenizer, request)

    LogprobsProcessor.from_new_request = classmethod(from_new_request)
