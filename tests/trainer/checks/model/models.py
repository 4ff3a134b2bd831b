"""Configs of published models and of a tiny one, for tests that need no weights."""

from transformers import AutoConfig


def decoder(kind, hidden, intermediate, layers, heads, kv_heads, vocabulary, positions, tied=False, head_dim=None):
    config = dict(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        max_position_embeddings=positions,
        tie_word_embeddings=tied,
    )
    return AutoConfig.for_model(kind, **config, **({"head_dim": head_dim} if head_dim else {}))


# a part of a published model's name -> its published number of parameters, and its shape
PUBLISHED = {
    "Qwen2.5-Math-1.5B": (1.54e9, ("qwen2", 1536, 8960, 28, 12, 2, 151936, 4096, True)),
    "Qwen2.5-Math-7B": (7.62e9, ("qwen2", 3584, 18944, 28, 28, 4, 152064, 4096)),
    "Qwen2.5-0.5B": (0.494e9, ("qwen2", 896, 4864, 24, 14, 2, 151936, 32768, True)),
    "Qwen2.5-3B": (3.09e9, ("qwen2", 2048, 11008, 36, 16, 2, 151936, 32768, True)),
    "Qwen2.5-7B": (7.62e9, ("qwen2", 3584, 18944, 28, 28, 4, 152064, 32768)),
    "Qwen3-0.6B": (0.596e9, ("qwen3", 1024, 3072, 28, 16, 8, 151936, 40960, True, 128)),
    "Qwen3-8B": (8.19e9, ("qwen3", 4096, 12288, 36, 32, 8, 151936, 40960, False, 128)),
    "Qwen3-14B": (14.8e9, ("qwen3", 5120, 17408, 40, 40, 8, 151936, 40960, False, 128)),
    "Llama-3.2-3B": (3.21e9, ("llama", 3072, 8192, 28, 24, 8, 128256, 131072, True)),
    "Llama-3.1-8B": (8.03e9, ("llama", 4096, 14336, 32, 32, 8, 128256, 131072)),
}


def model(name: str):
    """Return the config of a published model, with the sizes of its config.json."""
    return decoder(*next(shape for part, (_, shape) in PUBLISHED.items() if part in name))


TINY = ("llama", 64, 160, 3, 4, 2, 500, 128)
