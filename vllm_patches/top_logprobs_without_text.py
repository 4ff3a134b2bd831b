"""Gives requests the log-probabilities of many tokens without decoding the tokens' text, on vLLM 0.24 and 0.30.

vLLM decodes the text of every candidate token of every step in Python, in the process that serves all requests. It does
so unless a request's own text is not decoded either, and stop texts need that text. With this change, requests that ask
for `flat_logprobs`, as rollouts do, get ids and numbers only, a step's at once instead of one after another. It can go
when a request can ask for this.
"""

import functools
from itertools import islice


def leave_out_text() -> None:
    """Wrap `LogprobsProcessor.from_new_request`."""
    from vllm.logprobs import FlatLogprobs
    from vllm.v1.engine.logprobs import LogprobsProcessor

    class StepByStep(FlatLogprobs):
        """Takes all numbers of a step at once; vLLM's own takes four at a time."""

        def append_fast(self, token_ids, logprobs, ranks, decoded_tokens):
            ranks = list(ranks)
            n = len(ranks)  # there are more columns where another request of the batch asks for more
            self.start_indices.append(len(self.logprobs))
            self.token_ids += token_ids[:n]
            self.logprobs += logprobs[:n]
            self.ranks += ranks
            self.decoded_tokens += islice(decoded_tokens, n)
            self.end_indices.append(len(self.logprobs))

        def __getitem__(self, index):
            """A slice is of this class."""
            found = super().__getitem__(index)
            return StepByStep(**vars(found)) if isinstance(found, FlatLogprobs) else found

        def extend(self, logprobs_multi_positions):
            """vLLM's own goes through a dict for each step, in which a chosen token that is among the most likely ones
            is once, not twice."""
            before = len(self.logprobs)
            for name, values in vars(logprobs_multi_positions).items():
                of_places = name in ("start_indices", "end_indices")
                getattr(self, name).extend([before + at for at in values] if of_places else values)

    made = LogprobsProcessor.from_new_request.__func__
    if hasattr(made, "__wrapped__"):
        return

    @functools.wraps(made)
    def from_new_request(cls, tokenizer, request):
        if not request.sampling_params.flat_logprobs:
            return made(cls, tokenizer, request)
        processor = made(cls, None, request)
        if processor.logprobs is not None:
            processor.logprobs = StepByStep()
        return processor

    LogprobsProcessor.from_new_request = classmethod(from_new_request)
