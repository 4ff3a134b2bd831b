"""Sampling with seeds on CPUs: vLLM's own tokens and processed log-probabilities, without noise that is drawn in vain.

That generators keep their state when a token is discarded is seen with an engine: test_weight_reload_on_cpu.py.
"""

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.sample.ops import topk_topp_sampler as vllm

from vllm_patches.cpu_seeded_requests import draw_seeded_rows_once

ROWS, VOCABULARY = 5, 200


def vllms_own(*arguments):
    sample = vllm.TopKTopPSampler.forward_cpu
    while hasattr(sample, "__wrapped__"):  # where another test has applied the patches
        sample = sample.__wrapped__
    return sample(*arguments)


def drawn(sample, mode: str, seeded: int, fp64: bool = False, k: int | None = None, p: float | None = None):
    """Three tokens for each row, the processed values, and the state of the generator that all other rows share."""
    torch.manual_seed(7)
    logits = torch.randn(ROWS, VOCABULARY)
    generators = {row: torch.Generator().manual_seed(row) for row in range(seeded)}
    sampler = SimpleNamespace(logprobs_mode=mode, use_fp64_gumbel=fp64)
    k = None if k is None else torch.full((ROWS,), k)
    p = None if p is None else torch.full((ROWS,), p)
    results = [sample(sampler, logits.clone(), generators, k, p) for _ in range(3)]
    return [tokens.tolist() for tokens, _ in results], [processed for _, processed in results], torch.get_rng_state()


@pytest.mark.parametrize("mode", ["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"])
@pytest.mark.parametrize("seeded", [ROWS - 1, ROWS])
@pytest.mark.parametrize("options", [{}, {"fp64": True}, {"k": 3}, {"k": 9, "p": 0.5}])
def test_the_tokens_are_vllms_own(mode, seeded, options):
    ours = drawn(draw_seeded_rows_once(vllms_own), mode, seeded, **options)
    theirs = drawn(vllms_own, mode, seeded, **options)
    assert ours[0] == theirs[0] and len({tuple(tokens) for tokens in ours[0]}) > 1
    for mine, vllms in zip(ours[1], theirs[1], strict=True):
        assert (mine is None) == (vllms is None) == mode.startswith("raw")
        assert mine is None or torch.equal(mine, vllms)


def test_noise_is_drawn_once_where_all_rows_have_seeds():
    """If vLLM's own sampler does so too, the patch can go."""
    unused = drawn(draw_seeded_rows_once(vllms_own), "raw_logprobs", ROWS)[2]
    used = drawn(vllms_own, "raw_logprobs", ROWS)[2]
    torch.manual_seed(7)
    torch.randn(ROWS, VOCABULARY)
    assert torch.equal(unused, torch.get_rng_state()) and not torch.equal(used, torch.get_rng_state())
