"""Makes the data and the model for check_gpu.sh: python scripts/check_gpu/check_gpu_inputs.py FOLDER MODEL

The tasks' data go to FOLDER/countdown and FOLDER/search_task, and demonstrations of the second task to
FOLDER/search_task/sft, and a tiny Qwen3 to FOLDER/qwen3. If MODEL lies in FOLDER, it is the tiny Qwen2,
which is made too. Nothing is downloaded.
"""

import asyncio
import os
import sys
from pathlib import Path

from transformers import AutoConfig, Qwen3Config, Qwen3ForCausalLM

from recipe.arpo import sft_data
from recipe.common.tiny_model import TinyModelConfig, write_tiny_model
from recipe.tasks.countdown.data import CountdownConfig, write_countdown
from recipe.tasks.search.data import EXTRA_WORDS, SearchTaskConfig, write_search_task

# Attention heads have 64 dimensions: FlashInfer, which vLLM uses on Blackwell, supports only 64, 128 and 256.
TINY_MODEL = {"hidden_size": 256, "intermediate_size": 512, "num_heads": 4, "num_kv_heads": 2}


def make_inputs(folder: Path, model: Path, demonstrations: int) -> None:
    """Make each task's data with `demonstrations` examples for SFT, and the tiny model if `model` lies in `folder`."""
    write_countdown(folder / "countdown", CountdownConfig(train_size=512, test_size=8, demo_size=demonstrations))
    task = folder / "search_task"
    sizes = {"train_size": 512, "test_size": 8, "demo_size": demonstrations}
    asyncio.run(write_search_task(task, SearchTaskConfig(**sizes)))
    config = TinyModelConfig(**TINY_MODEL, extra_words=EXTRA_WORDS)
    if folder in model.parents:
        write_tiny_model(model, config)
    qwen2 = AutoConfig.from_pretrained(write_tiny_model(folder / "qwen3", config)).to_dict()
    qwen2_only = ("model_type", "architectures", "layer_types")
    qwen3 = Qwen3Config(**{key: value for key, value in qwen2.items() if key not in qwen2_only}, head_dim=64)
    Qwen3ForCausalLM(qwen3).save_pretrained(folder / "qwen3")
    arguments = ["--input", task / "demonstrations.jsonl", "--output", task / "sft", "--tokenizer", model]
    sft_data.main([str(argument) for argument in arguments])


if __name__ == "__main__":
    dry_run = os.environ.get("DRY_RUN", "0") not in ("", "0")
    make_inputs(Path(sys.argv[1]), Path(sys.argv[2]), demonstrations=64 if dry_run else 14_400)
