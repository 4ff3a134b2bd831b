"""The bytes that a micro-batch's tokens take on a GPU while a model of `transformers` trains on them in bfloat16."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TokenBytes:
    """The bytes of a token, and of what a prefix tree gathers, at the two moments that may hold most. A forward keeps
    `kept` of each token. The backward begins with `logits`, and goes on with one `layer` after another."""

    kept: int  # hidden states before each layer with gradient checkpointing, otherwise every saved tensor of the layers
    layer: int  # saved tensors of a checkpointed layer's second forward; 0 without checkpointing
    logits: int  # the logits and their gradient
    # A key and a value that a segment gathers, and their gradients. Kernels compute these for each query head first,
    # also where query heads share keys.
    gathered: int
    segment: int  # the kernel's float32 sum of query gradients has 128 more rows for each segment

    @classmethod
    def of(cls, hf_config, checkpointing: bool = True) -> "TokenBytes":
        """Return the bytes for a `PretrainedConfig`."""
        text = hf_config.get_text_config()
        hidden, layers, heads = text.hidden_size, text.num_hidden_layers, text.num_attention_heads
        head_dim = getattr(text, "head_dim", None) or hidden // heads
        queries, keys = heads * head_dim, (getattr(text, "num_key_value_heads", None) or heads) * head_dim
        # measured with saved-tensor hooks; 6 of the 10 bytes are of Qwen3's norms of queries and keys
        layer = 8 * text.intermediate_size + 16 * hidden + 10 * (queries + keys)
        return cls(
            kept=2 * hidden * layers if checkpointing else layer * layers,
            layer=layer if checkpointing else 0,
            logits=4 * text.vocab_size,
            gathered=8 * keys + 4 * queries * (queries != keys) + (0 if checkpointing else 4 * keys * (layers - 1)),
            segment=128 * 4 * queries,
        )

    def tokens(self, n_tokens: int, gathered: int, segments: int) -> int:
        """Return the number of tokens without a prefix tree that take as much as `n_tokens` distinct ones of a tree
        whose `segments` gather so many keys."""
        more = max(0, gathered - n_tokens) * self.gathered + segments * self.segment
        spare = max(0, self.logits - self.layer) * n_tokens if self.layer else 0  # logits are gone before the layers
        return n_tokens + max(0, more - spare) // (self.kept + max(self.logits, self.layer))
