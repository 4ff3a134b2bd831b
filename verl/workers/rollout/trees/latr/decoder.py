"""LATR as a plain function on a `transformers` model, for people who only want the decoder."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

from verl.workers.rollout.rollout_engine import TransformersEngine, end_of_sequence_ids
from verl.workers.rollout.trajectory_tree import TrajectoryTree
from verl.workers.rollout.trees.latr.config import KTConfig
from verl.workers.rollout.trees.latr.growth import latr_group


def latr_generate(
    model,
    tokenizer,
    prompts: Sequence[Sequence[int]],
    config: KTConfig,
    n: int = 8,
    max_new_tokens: int = 512,
    seed: int = 0,
) -> list[TrajectoryTree]:
    """Lookahead-tree rollouts of every prompt.

    Args:
        model: a `transformers` causal LM, any dtype, CPU or GPU.
        tokenizer: its tokenizer; its end-of-sequence token, and those of the model's generation config, end a response.
        prompts: token ids.
        config: the `kt` keys; the mix ratio is that of training step 0.
        n: responses per prompt.
        max_new_tokens: of a response.
        seed: of the ordinary sampling at temperature 1 after the tree and beside it. The tree itself is greedy.

    Returns:
        one tree per prompt. `tree.trajectories()`: the n responses' token ids in branch order, end-of-sequence token
        included, no padding; fewer than n where branches never opened and `fill_return_sequences` is off.

    Raises:
        ValueError: no prompt tokens, or n < 1.
    """
    if n < 1 or not all(len(prompt) for prompt in prompts):
        raise ValueError(f"n={n}, prompt lengths {[len(prompt) for prompt in prompts]}: expected at least 1 each")
    engine = TransformersEngine(model)
    text_of = lru_cache(maxsize=None)(lambda token: tokenizer.decode([token]))

    async def all_groups() -> list[TrajectoryTree]:
        groups = [
            latr_group(
                engine,
                prompt,
                n,
                config,
                max_new_tokens=max_new_tokens,
                eos_token_ids=end_of_sequence_ids(tokenizer, getattr(model, "generation_config", None)),
                text_of=text_of,
                seed=seed + i,
            )
            for i, prompt in enumerate(prompts)
        ]
        return [await group for group in groups]

    # in a thread of its own: a notebook already runs an event loop in this one
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, all_groups()).result()
