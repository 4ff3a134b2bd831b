"""LATR as a plain function on a `transformers` model, for people who only want the decoder."""

from collections.abc import Sequence
from functools import lru_cache

from recipe.latr.keys import KTConfig
from recipe.latr.tree import Policy
from verl.workers.rollout.engines.interface import end_of_sequence_ids, result_in_thread
from verl.workers.rollout.engines.local_transformers import TransformersEngine
from verl.workers.rollout.trajectory_tree import TrajectoryTree
from verl.workers.rollout.tree_builder import grow


def latr_generate(
    model,
    tokenizer,
    prompts: Sequence[Sequence[int]],
    config: KTConfig,
    n: int = 8,
    max_new_tokens: int = 512,
    seed: int = 0,
) -> list[TrajectoryTree]:
    """Grow a lookahead tree with n branches for every prompt by a `transformers` causal LM, on CPU or GPU.

    The mix ratio is that of training step 0. The tree is greedy; `seed` is for the sampling at temperature 1 after and
    beside it. `tree.trajectories()` returns the responses' token ids in branch order with the end-of-sequence token;
    fewer than n if branches never opened and `fill_return_sequences` is off.
    """
    engine = TransformersEngine(model)
    policy = Policy(config, lru_cache(maxsize=None)(lambda token: tokenizer.decode([token])))
    ends = end_of_sequence_ids(tokenizer, getattr(model, "generation_config", None))

    async def all_prompts() -> list[TrajectoryTree]:
        options = {"max_tokens": max_new_tokens, "stop_token_ids": ends}
        return [await grow(engine, prompt, n, policy, **options, seed=seed + i) for i, prompt in enumerate(prompts)]

    return result_in_thread(all_prompts())  # a notebook already runs an event loop in this thread
