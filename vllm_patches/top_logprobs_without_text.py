"""Lets vLLM 0.24 and 0.30 report the log-probabilities of many tokens without decoding the tokens' text.

vLLM decodes the text of every candidate token of every step in Python, in the process that serves all requests. It does
so unless the request's own text is not decoded either, but stop texts need that text. With this change, requests with
`flat_logprobs`, as rollouts send them, get only ids and numbers, and those of a step are stored at once instead of one
by one. It can go when vLLM has a request option for this.
"""

import functools
from itertools import islice


def leave_out_text() -> None:
    """Wrap `LogprobsProcessor.from_new_request`, so that requests with `flat_logprobs` decode no candidate tokens."""
    from vllm.logprobs import FlatLogprobs
    from vllm.v1.engine.logprobs import LogprobsProcessor

    class StepByStep(FlatLogprobs):
        """Log-probabilities that store a step's values with one list operation per field."""

        def append_fast(self, token_ids, logprobs, ranks, decoded_tokens):
            ranks = list(ranks)
            n = len(ranks)  # the other lists are longer if another request of the batch wants more tokens
            self.start_indices.append(len(self.logprobs))
            self.token_ids += token_ids[:n]
            self.logprobs += logprobs[:n]
            self.ranks += ranks
            self.decoded_tokens += islice(decoded_tokens, n)
            self.end_indices.append(len(self.logprobs))

        def __getitem__(self, index):
            """Return a step, or for a slice an object of this class."""
            item = super().__getitem__(index)
            return StepByStep(**vars(item)) if isinstance(item, FlatLogprobs) else item

        def extend(self, logprobs_multi_positions):
            """Append steps. vLLM's own method makes a dict of each step, which merges the two entries of a chosen token
            that is also among the most likely ones."""
            before = len(self.logprobs)
            for name, values in vars(logprobs_multi_positions).items():
                holds_indices = name in ("start_indices", "end_indices")
                getattr(self, name).extend([before + at for at in values] if holds_indices else values)

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
