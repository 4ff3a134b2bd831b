"""The made search task, and a tiny model that has learnt its form from some demonstrations by heart, in seconds."""

import asyncio
import json
from pathlib import Path

from transformers import AutoTokenizer

from recipe.arpo.sft_data import messages_of
from recipe.common.tiny_model import TinyModelConfig, write_tiny_model
from recipe.tasks.search.data import CHAT_WORDS, EXTRA_WORDS, SearchTaskConfig, write_search_task
from tests.e2e.learning import learn_by_heart
from verl.utils.dataset.tool_sft_dataset import encoder_of
from verl.utils.reward_score.tool_format import TOOL_TAGS


def write_task_and_model(folder: Path, environment: str = "tools") -> None:
    """`folder` gets train.parquet, test.parquet, corpus.jsonl, and the model in `model`."""
    config = SearchTaskConfig(people=6, train_size=64, test_size=4, demo_size=16, demo_correct=0.8)
    asyncio.run(write_search_task(folder, config))
    words = EXTRA_WORDS + CHAT_WORDS if environment == "chat" else EXTRA_WORDS
    write_tiny_model(folder / "model", TinyModelConfig(extra_words=words))
    encoder = encoder_of(AutoTokenizer.from_pretrained(folder / "model"), environment, TOOL_TAGS)
    lines = (folder / "demonstrations.jsonl").read_text().splitlines()
    encoded = [encoder.encode(messages_of(json.loads(line))) for line in lines]
    loss = learn_by_heart(folder / "model", encoded, parts=4)
    assert loss < 0.5, f"{loss}: the form has not been learnt"
