"""Two changes of vLLM 0.30's CPU engine for requests with a seed; for VERL_PLATFORM=cpu only.

A prompt that is prefilled in several steps samples a token in each step. vLLM discards the token and resets the
request's random generator by its offset, but CPU generators have no offset ("CPU Generator does not use offset", and
the engine dies). This patch restores the generator's state from before the sampling. This can go when vLLM's CPU runner
restores the state itself.

vLLM's CPU sampler draws noise for every row, and draws it again for the rows with a seed. Its sampler for other
devices, `forward_native`, omits the first draw if all rows have a seed, so this patch uses it for them. With a
vocabulary of 49,152 this saves a tenth of the generation time. In 0.24, which tests run on CPU, `forward_cpu` also
ignores all seeds beside a row that has none. This can go when `forward_cpu` omits the draw too.
"""

import functools


def draw_seeded_rows_once(sample):
    """Return `sample`, `TopKTopPSampler.forward_cpu`, without redundant noise; its tokens are those of vLLM 0.30."""
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    @functools.wraps(sample)
    def sample_once(self, logits, generators, k, p):
        chosen = TopKTopPSampler.forward_native if generators else sample
        return chosen(self, logits, generators, k, p)

    return sample_once


def adapt_sampling() -> None:
    """Wrap `TopKTopPSampler.forward_cpu`, which samples, and `GPUModelRunner._bookkeeping_sync`, which resets."""
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    states = {}  # id of a generator -> its state before the last sampling
    sample, book = TopKTopPSampler.forward_cpu, GPUModelRunner._bookkeeping_sync
    if hasattr(sample, "__wrapped__"):
        return
    sample = draw_seeded_rows_once(sample)

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
