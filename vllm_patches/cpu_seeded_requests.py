"""Lets vLLM 0.30's CPU engine serve requests that have a seed; for VERL_PLATFORM=cpu only.

A prompt that is prefilled in several steps samples a token in each step. vLLM discards the token and sets the request's
random generator back by its offset, but CPU generators have no offset ("CPU Generator does not use offset", and the
engine dies). Here the generator gets its state from before the sampling back. This can go when vLLM's CPU runner
restores the state itself.
"""

import functools


def rewind_discarded_samples() -> None:
    """Wrap `TopKTopPSampler.forward_cpu`, which samples, and `GPUModelRunner._bookkeeping_sync`, which sets back."""
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    states = {}  # id of a generator -> its state before the last sampling
    sample, book = TopKTopPSampler.forward_cpu, GPUModelRunner._bookkeeping_sync
    if hasattr(sample, "__wrapped__"):
        return

    @functools.wraps(sample)
    def sample_and_remember(self, logits, generators, *args, **kwargs):
        states.clear()
        states.update({id(generator): generator.get_state() for generator in generators.values()})
        return sample(self, logits, generators, *args, **kwargs)

    @functools.wraps(book)
    def rewind_then_book(self, *args, **kwargs):
        generators = self.input_batch.generators
        discarded = self.discard_request_mask.np[: self.input_batch.num_reqs].nonzero()[0]
        rewound = {row: generators.pop(row) for row in map(int, discarded) if row in generators}
        for generator in rewound.values():
            if id(generator) in states:
                generator.set_state(states[id(generator)])
        try:
            return book(self, *args, **kwargs)
        finally:
            generators.update(rewound)

    TopKTopPSampler.forward_cpu, GPUModelRunner._bookkeeping_sync = sample_and_remember, rewind_then_book
