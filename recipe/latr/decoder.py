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
    """Grow a lookahead tree for every prompt.

    Args:
        model: a `transformers` causal LM, any dtype, CPU or GPU.
        tokenizer: the model's tokenizer. Its end-of-sequence token and those of the generation config end a response.
        prompts: token ids of each prompt.
        config: the `kt` keys; the mix ratio is that of training step 0.
        n: number of responses per prompt.
        max_new_tokens: largest number of tokens of a response.
        seed: seed of the sampling at temperature 1 after and beside the tree. The tree itself is greedy.

    Returns:
        one tree per prompt. `tree.trajectories()` returns the n responses' token ids in branch order, with the
        end-of-sequence token and without padding; fewer if branches never opened and `fill_return_sequences` is off.

    Raises:
        ValueError: no prompt tokens, or n < 1.
    """
    engine = TransformersEngine(model)
    policy = Policy(config, lru_cache(maxsize=None)(lambda token: tokenizer.decode([token])))
    ends = end_of_sequence_ids(tokenizer, getattr(model, "generation_config", None))

    async def all_prompts() -> list[TrajectoryTree]:
        options = {"max_tokens": max_new_tokens, "stop_token_ids": ends}
        return [await grow(engine, prompt, n, policy, **options, seed=seed + i) for i, prompt in enumerate(prompts)]

    return result_in_thread(all_prompts())  # a notebook already runs an event loop in this thread
