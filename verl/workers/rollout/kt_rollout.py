"""LATR as a group rollout: `actor_rollout_ref.rollout.name=kt`, its keys under `rollout.kt` (see KTConfig)."""

import time
from functools import lru_cache
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.utils.config import omega_conf_to_dataclass

from verl.workers.rollout.group_rollout import GroupRollout, VersionRecorder
from verl.workers.rollout.trees.latr.growth import Sampling, latr_group
from verl.workers.rollout.trees.latr.schedule import NOTCHES, tightened


class KTRollout(GroupRollout):
    """A lookahead tree per prompt on the serving engine; validation samples the ordinary way."""

    def __init__(self, config, agent_loop, engine, tokenizer):
        super().__init__(config, agent_loop, engine, tokenizer)
        self.rollout_config = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
        self.text_of = lru_cache(maxsize=None)(lambda token: tokenizer.decode([token]))

    async def run(self, prompt: dict[str, Any], n: int, sampling_params: dict[str, Any]) -> list[AgentLoopOutput]:
        started, prompt_ids = time.perf_counter(), await self.prompt_ids(prompt)
        engine = VersionRecorder(self.engine, sampling_params)
        tree = await latr_group(
            engine,
            prompt_ids,
            n,
            tightened(self.rollout_config.kt, prompt.get(NOTCHES, 0)),
            max_new_tokens=self.room(len(prompt_ids)),
            eos_token_ids=self.stop_token_ids,
            text_of=self.text_of,
            training_step=int(prompt["global_steps"]),
            sampling=Sampling(*(sampling_params[name] for name in ("temperature", "top_p", "top_k"))),
            seed=self.seed_of(prompt),
            request_id=prompt["uid"],
        )
        metrics = AgentLoopMetrics(generate_sequences=time.perf_counter() - started)
        about_group = self.about_group(tree, prompt, engine.tokens)
        rows = zip(tree.trajectories(), tree.response_masks(), tree.log_probs(), tree.segment_ids(), strict=True)
        return [
            AgentLoopOutput(
                prompt_ids=prompt_ids,
                response_ids=tokens,
                response_mask=mask,
                response_logprobs=log_probs,
                num_turns=2,
                metrics=metrics,
                extra_fields={"turn_scores": [], "tool_rewards": [], "segment_ids": segment_ids}
                | (about_group if i == 0 else {})
                | engine.versions(),
            )
            for i, (tokens, mask, log_probs, segment_ids) in enumerate(rows)
        ]
