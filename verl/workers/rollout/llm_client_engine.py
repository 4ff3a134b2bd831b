"""The engine of group rollouts on vLLM: upstream's LLM client.

Its routing is sticky and prefixes are cached, so that a fork costs its new tokens only.
"""

from collections.abc import Sequence
from uuid import uuid4

from verl.workers.rollout.rollout_engine import Generation

ABORTED = "aborted"


class LLMClientEngine:
    """See `RolloutEngine`. `n_candidates` needs a server that reports them (`candidate_server`).

    A request that is aborted in mid-generation, as for a weight sync, goes on from the tokens it has; `info` then holds
    the oldest and the newest weights' version among its parts.
    """

    def __init__(self, client):
        self.client = client

    async def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        max_tokens: int,
        stop_token_ids: Sequence[int],
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = -1,
        seed: int | None = None,
        n_candidates: int = 0,
        stop: Sequence[str] = (),
        request_id: str | None = None,
    ) -> Generation:
        result = Generation([], [], [] if n_candidates else None)
        stop_ids, versions, request_id = set(stop_token_ids), [], request_id or uuid4().hex
        while True:
            params = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "repetition_penalty": 1.0}
            params |= {"logprobs": True, "max_tokens": max_tokens - len(result.token_ids)}
            params |= {"stop_token_ids": list(stop_token_ids)}
            if stop:
                # tags may be special tokens; the text that is searched must show them
                params |= {"stop": list(stop), "skip_special_tokens": False}
            if seed is not None:
                params["seed"] = seed + len(result.token_ids)
            if n_candidates:
                params["n_candidates"] = n_candidates
            output = await self.client.generate(
                request_id, prompt_ids=[*prompt_ids, *result.token_ids], sampling_params=params
            )
            result.token_ids += list(output.token_ids)
            result.log_probs += list(output.log_probs or [])
            if n_candidates:
                result.candidates += output.extra_fields.get("candidates", [])
            versions += [output.extra_fields.get(name) for name in ("min_global_steps", "max_global_steps")]
            result.stopped = bool(result.token_ids) and result.token_ids[-1] in stop_ids
            if output.stop_reason != ABORTED or result.stopped or len(result.token_ids) >= max_tokens:
                break
        known = [version for version in versions if version is not None]
        if known:
            result.info = {"min_global_steps": min(known), "max_global_steps": max(known)}
        return result
