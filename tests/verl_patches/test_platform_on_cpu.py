"""The CPU platform's log-probabilities and their gradients are exactly upstream's."""

from types import SimpleNamespace

import pytest
import torch
from verl.utils.torch_functional import logprobs_from_logits_v2 as upstreams

from verl_patches import platform_cpu


@pytest.mark.parametrize("shape", [(1000,), (6, 50)])
def test_log_probs_and_gradients_are_upstreams(monkeypatch, shape):
    monkeypatch.setattr(platform_cpu, "CHUNK_ELEMENTS", 4000)  # several chunks, the last one smaller
    platform_cpu.take_logsumexp_of_many_tokens(patched := SimpleNamespace(logprobs_from_logits_v2=upstreams))
    logits, labels, weights = 5 * torch.randn(*shape, 266), torch.randint(266, shape), torch.randn(shape)
    for dtype in (torch.float32, torch.bfloat16):
        values = []
        for function in (upstreams, patched.logprobs_from_logits_v2):
            leaf = logits.to(dtype).requires_grad_()
            log_probs = function(leaf, labels)
            values.append([log_probs, *torch.autograd.grad((weights * log_probs).sum(), leaf)])
        assert all(map(torch.equal, *values))
