"""A Qwen2 model small enough to train on a laptop, with a byte-level tokenizer and a chat template.

The weights are random; `run_warm_start.sh` teaches the format. Nothing is downloaded.
    python -m recipe.common.tiny_model --output-dir outputs/tiny_model
"""

import argparse
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from verl.utils.atomic_files import new_folder

END_OF_TURN, START_OF_TURN, PAD = "<|im_end|>", "<|im_start|>", "<|endoftext|>"
# Each of these words is one token, so that a turn costs the tiny model few steps. They stay in the decoded text.
WORDS = ("system", "user", "assistant", "<think>", "</think>", "<answer>", "</answer>")

# ChatML, which also describes tools, and writes calls as Qwen2.5 does
CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja").read_text(encoding="utf-8")


@dataclass(frozen=True, kw_only=True)
class TinyModelConfig:
    """Sizes of the model; the defaults make 0.36 M parameters. `max_length` is that of prompt and response together;
    `extra_words` are one token each, in addition to `WORDS`."""

    hidden_size: int = 96
    intermediate_size: int = 288
    num_layers: int = 3
    num_heads: int = 3
    num_kv_heads: int = 3
    max_length: int = 2048
    tie_word_embeddings: bool = True
    seed: int = 0
    extra_words: tuple[str, ...] = ()


def model_of_1_3_million(extra_words: Sequence[str]) -> TinyModelConfig:
    return TinyModelConfig(
        hidden_size=160, intermediate_size=640, num_heads=5, num_kv_heads=5, extra_words=tuple(extra_words)
    )


def make_tokenizer(max_length: int = 2048, extra_words: Sequence[str] = ()):
    """Return a `PreTrainedTokenizerFast` of 256 bytes, three special tokens, `WORDS` and `extra_words`. "\\n" is one
    token, as verl's chat-template code asks for."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([PAD, START_OF_TURN, END_OF_TURN])
    core.add_tokens([AddedToken(word, special=False, normalized=False) for word in (*WORDS, *extra_words)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END_OF_TURN,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


def make_model(config: TinyModelConfig, tokenizer):
    """Return a `Qwen2ForCausalLM` in float32 with seeded random weights."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(config.seed)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            max_position_embeddings=config.max_length,
            tie_word_embeddings=config.tie_word_embeddings,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    ).float()


def write_tiny_model(output_dir: str | Path, config: TinyModelConfig | None = None) -> Path:
    """Write model and tokenizer to a Hugging Face folder that is never incomplete; return the folder."""
    config = config or TinyModelConfig()
    output_dir = Path(output_dir)
    there = list(output_dir.glob("*"))
    if there and ("config.json" not in {path.name for path in there} or any(path.is_dir() for path in there)):
        raise FileExistsError(f"{output_dir} holds something else than a model: choose another folder")
    tokenizer = make_tokenizer(config.max_length, config.extra_words)
    with new_folder(output_dir) as unfinished:
        make_model(config, tokenizer).save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        shutil.rmtree(output_dir, ignore_errors=True)
    return output_dir


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", required=True)
    print(f"tiny model: {write_tiny_model(parser.parse_args().output_dir)}")


if __name__ == "__main__":
    main()
