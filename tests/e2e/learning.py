"""Models that know something, in seconds: a few demonstrations learnt by heart."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def learn_by_heart(
    folder: Path, encoded: Sequence[tuple[list[int], list[int]]], steps: int = 120, parts: int = 1
) -> float:
    """Train the model in `folder` on (token ids, loss mask) pairs, in each step on a part of them; its last loss."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    longest = max(len(ids) for ids, _ in encoded)
    ids = torch.tensor([ids + [tokenizer.pad_token_id] * (longest - len(ids)) for ids, _ in encoded])
    mask = torch.tensor([mask + [0] * (longest - len(mask)) for _, mask in encoded])
    labels = ids.masked_fill(mask == 0, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more threads gain nothing for so small a model, and spin on a busy machine
    for step in range(steps):
        loss = model(ids[step % parts :: parts], labels=labels[step % parts :: parts]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.set_num_threads(threads)
    model.save_pretrained(folder)
    return loss.item()
