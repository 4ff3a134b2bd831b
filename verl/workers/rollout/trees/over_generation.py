"""Over-generation, the ablation beside LATR: sample more than n responses the ordinary way, keep the n most different.

`actor_rollout_ref.rollout.name=over_generation`, with `rollout.kt.over_generation_factor`; the rest of `rollout.kt` is
not used.
"""

import math
import random
import time
from collections.abc import Sequence
from typing import Any

from rapidfuzz.distance import Levenshtein
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.utils.config import omega_conf_to_dataclass

from verl.workers.rollout.group_rollout import GroupRollout, VersionRecorder
from verl.workers.rollout.rollout_engine import Generation, gather_or_cancel
from verl.workers.rollout.trajectory_tree import tree_of_rows


def most_diverse(responses: Sequence[Sequence[int]], n: int) -> list[int]:
    """Indices of n responses, ascending: the first one, then always the one whose nearest chosen one is farthest.

    Distance is Levenshtein's over the longer length; among equals the first wins. Greedy farthest-point selection, at
    most twice as bad as the best choice (Gonzalez 1985).
    """
    chosen, nearest = [], [math.inf] * len(responses)
    while len(chosen) < n:
        at = max((i for i in range(len(responses)) if i not in chosen), key=lambda i: nearest[i])
        chosen.append(at)
        distances = [Levenshtein.normalized_distance(responses[at], response) for response in responses]
        nearest = [min(pair) for pair in zip(nearest, distances, strict=True)]
    return sorted(chosen)


class OverGeneration(GroupRollout):
    """round(n * over_generation_factor) independent samples, of which n are returned; factor 1 returns all."""

    def __init__(self, config, agent_loop, engine, tokenizer):
        super().__init__(config, agent_loop, engine, tokenizer)
        self.factor = omega_conf_to_dataclass(config.actor_rollout_ref.rollout).kt.over_generation_factor

    async def run(self, prompt: dict[str, Any], n: int, sampling_params: dict[str, Any]) -> list[AgentLoopOutput]:
        started, prompt_ids = time.perf_counter(), await self.prompt_ids(prompt)
        engine = VersionRecorder(self.engine, sampling_params)
        samples = await self._sample(engine, prompt, prompt_ids, max(n, round(n * self.factor)), sampling_params)
        responses = [one.token_ids for one in samples]
        kept = most_diverse(responses, n)
        tree = tree_of_rows(prompt_ids, responses, [one.log_probs for one in samples], kept)
        for segment in tree.segments:
            if not set(segment.info.pop("rows")) & set(kept):
                segment.info["pruned"] = "less diverse"
        share = sum(len(responses[i]) for i in kept) / engine.tokens if engine.tokens else 1.0
        tree.metrics = {"kept_token_share": share}
        outputs = self._outputs(prompt_ids, [samples[i] for i in kept], engine, time.perf_counter() - started)
        outputs[0].extra_fields |= self.about_group(tree, prompt, engine.tokens)
        return outputs

    async def _sample(
        self, engine: VersionRecorder, prompt: dict, prompt_ids: list[int], total: int, sampling_params: dict
    ) -> list[Generation]:
        seeds = random.Random(self.seed_of(prompt))
        requests = (
            engine.generate(
                prompt_ids,
                max_tokens=self.room(len(prompt_ids)),
                stop_token_ids=self.stop_token_ids,
                seed=seeds.getrandbits(31),
                request_id=prompt["uid"],
                **{name: sampling_params[name] for name in ("temperature", "top_p", "top_k")},
            )
            for _ in range(total)
        )
        return await gather_or_cancel(*requests)

    def _outputs(
        self, prompt_ids: list[int], kept: Sequence[Generation], engine: VersionRecorder, seconds: float
    ) -> list[AgentLoopOutput]:
        return [
            AgentLoopOutput(
                prompt_ids=prompt_ids,
                response_ids=sample.token_ids,
                response_mask=[1] * len(sample.token_ids),
                response_logprobs=sample.log_probs,
                num_turns=2,
                metrics=AgentLoopMetrics(generate_sequences=seconds),
                extra_fields={"turn_scores": [], "tool_rewards": []} | engine.versions(),
            )
            for sample in kept
        ]
