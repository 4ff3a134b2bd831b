"""Tiny models and random sequences with shared prefixes, for tests of the prefix tree against rows."""

import random
from functools import partial

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCABULARY = 31


def tiny_model(kind: str, dtype=torch.float32, tied: bool = True, kv_heads: int = 2):
    """Two layers, four query heads, and weights large enough that tokens matter to each other."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": kv_heads, "head_dim": 8}
    config = AutoConfig.for_model(kind, vocab_size=VOCABULARY, tie_word_embeddings=tied, **shape, **heads)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    if dtype == torch.float64:
        for norm in [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]:
            norm.forward = partial(_rms_norm, norm)
    return model.to(dtype)


def _rms_norm(norm: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """Normalize in the input's precision; the models' own norms compute in float32."""
    return norm.weight * hidden * (hidden.square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()


def random_sequences(rng: random.Random, tokens: int = VOCABULARY, length: int = 12) -> list[torch.Tensor]:
    """Groups that share a system text: duplicates, the one inside the other, empty responses, single tokens."""
    system = [rng.randrange(tokens) for _ in range(rng.randint(1, length))]
    sequences: list[list[int]] = [system]
    for _ in range(rng.randint(1, 9)):
        start = rng.choice(sequences)
        start = start[: rng.randint(0, len(start))] if rng.random() < 0.7 else start
        new = [rng.randrange(tokens) for _ in range(rng.randint(0, length))]
        sequences.append(start + new or [rng.randrange(tokens)])
    rng.shuffle(sequences)
    return [torch.tensor(sequence) for sequence in sequences]


def row_log_probs(model, sequence: torch.Tensor, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """A sequence's log-probabilities and entropies by the textbook, from a forward of its own."""
    logits = model(sequence[None], use_cache=False).logits[0, :-1]
    log_softmax = (logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature).log_softmax(-1)
    return log_softmax.gather(-1, sequence[1:, None])[:, 0], -(log_softmax.exp() * log_softmax).sum(-1)
