"""A model of random weights that calls tools, for tests of the diagnosis."""

from functools import cache

import torch

from recipe.common.tiny_model import CHAT_TEMPLATE, TinyModelConfig, make_model, make_tokenizer

# one token each, which the model writes often: what ends a turn, a paragraph, and a result
WORDS = ("<search>", "</search>", "\n\n", "<result>", "</result>")


@cache
def model_and_tokenizer():
    """Random weights, a sharp distribution, and words that are written often enough to call tools and to fork."""
    torch.set_num_threads(1)  # more threads make so small a model slower
    tokenizer = make_tokenizer(extra_words=WORDS)
    tokenizer.chat_template = "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}" + CHAT_TEMPLATE
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 1, "num_heads": 1, "num_kv_heads": 1}
    model = make_model(TinyModelConfig(**sizes, tie_word_embeddings=False, extra_words=WORDS), tokenizer)
    often = tokenizer.convert_tokens_to_ids(["<search>", "</search>", "\n\n"])
    with torch.no_grad():
        model.model.norm.weight.mul_(40)
        model.lm_head.weight[often] *= 2
    return model, tokenizer
