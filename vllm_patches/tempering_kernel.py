"""The Triton kernel of `v2_adaptive_temperature`, which alone imports this module: a CPU install has no Triton."""

import torch
import triton
import triton.language as tl

from vllm_patches.tempered_requests import ENTROPY_FLOOR, SETTINGS

BLOCK = 4096  # number of logits that a program holds at a time
WARPS = 8


def divide_by_temperature(
    logits: torch.Tensor, slots: torch.Tensor, temperatures: torch.Tensor, settings: torch.Tensor
) -> None:
    """Divide each row in place by T (1 + temperature_tau h), or by T if its request has not opted in; skip greedy rows.

    With the row's entropy H in nats, z = (ln H - median) / std, and h is z times scale_pos if z > 0, else z times
    scale_neg, clipped to [-1, 1].

    Args:
        logits: (R, V) float32 before any temperature, with adjacent columns; -inf marks impossible tokens.
        slots: (R,) int32, index of each row's request in `temperatures` and `settings`.
        temperatures: (S,) float32, T of each request.
        settings: (S, 5) float32 in the order of SETTINGS, contiguous; zeros for a request that has not opted in.
    """
    _divide_row[(len(logits),)](
        logits,
        logits.stride(0),
        slots,
        temperatures,
        settings,
        logits.shape[1],
        N_SETTINGS=len(SETTINGS),
        FLOOR=ENTROPY_FLOOR,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )


@triton.jit
def _divide_row(
    logits_ptr,
    stride,
    slots_ptr,
    temperatures_ptr,
    settings_ptr,
    vocab_size,
    N_SETTINGS: tl.constexpr,
    FLOOR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the row's entropy if its request has opted in, then read the row again to divide it."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    divisor = tl.load(temperatures_ptr + slot)
    settings_ptr += slot * N_SETTINGS
    std = tl.load(settings_ptr + 2)
    if divisor == 0.0 or (std == 0.0 and divisor == 1.0):
        return
    logits_ptr += row * stride
    if std > 0.0:
        log_entropy = tl.log(tl.maximum(_entropy(logits_ptr, vocab_size, BLOCK), FLOOR))
        z = (log_entropy - tl.load(settings_ptr + 1)) / std
        scale = tl.where(z > 0.0, tl.load(settings_ptr + 3), tl.load(settings_ptr + 4))
        h = tl.minimum(tl.maximum(z * scale, -1.0), 1.0)
        divisor *= 1.0 + tl.load(settings_ptr) * h
    for start in range(0, vocab_size, BLOCK):
        places = start + tl.arange(0, BLOCK)
        inside = places < vocab_size
        values = tl.load(logits_ptr + places, mask=inside)
        tl.store(logits_ptr + places, values / divisor, mask=inside)


@triton.jit
def _entropy(logits_ptr, vocab_size, BLOCK: tl.constexpr):
    """Return the entropy in nats of softmax(y): log sum e^d - sum d e^d / sum e^d, with d = y minus the highest logit.
    While the row is read, y is taken minus the highest logit so far; both sums are rescaled when a higher one comes."""
    top = -3.0e38  # not -inf, because -inf - (-inf) is NaN
    total = 0.0
    weighted = 0.0
    for start in range(0, vocab_size, BLOCK):
        places = start + tl.arange(0, BLOCK)
        logits = tl.load(logits_ptr + places, mask=places < vocab_size, other=float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, axis=0))
        shift = top - new_top
        possible = logits > float("-inf")
        below = tl.where(possible, logits - new_top, 0.0)
        weights = tl.where(possible, tl.exp(below), 0.0)
        kept = tl.exp(shift)
        weighted = kept * (weighted + shift * total) + tl.sum(weights * below, axis=0)
        total = kept * total + tl.sum(weights, axis=0)
        top = new_top
    return tl.log(total) - weighted / total
