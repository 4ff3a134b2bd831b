"""A rollout engine on upstream's vLLM servers (verl 0.9.1); one server gets all requests of a group.

first request of a group ──> load balancer: acquire a server      upstream's client asks the balancer, one actor of
every request            ──> that server                          the whole run, before and after every request: a
the group has ended      ──> load balancer: release the server    tree makes hundreds of them
"""

import asyncio
import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any
from uuid import uuid4

from verl.workers.rollout.replica import RolloutReplicaRegistry

from verl.utils.fault_reports import RunError
from verl.workers.rollout.engines.interface import Generation, GenerationRequest, RolloutEngine, last_scores
from verl.workers.rollout.engines.request_batching import RequestBatcher
from verl.workers.rollout.tools.protocol import stops_after

ABORTED = "aborted"
REJECTED_SECONDS = 1.0


def serve_top_logprobs() -> None:
    """Let the vLLM servers that this process starts report top log-probs and entropies on request."""

    def load():
        return importlib.import_module("verl.workers.rollout.engines.top_logprobs_server").TopLogprobsReplica

    RolloutReplicaRegistry.register("vllm", load)


class GroupServers:
    """Assigns each group of requests to a server, by upstream's `LLMServerClient`. Only this class uses private names
    of upstream, and not its `generate`, which in asynchronous trainers drops top log-probs and entropies.

    The balancer counts the groups of each server, not their requests, and gives the next group to the server with the
    fewest. If a server dies, its groups fail; the balancer does not learn of the death and would choose it again.
    """

    def __init__(self, client):
        self.client = client
        self.acquired: dict[str, asyncio.Task] = {}  # group -> (server's id, actor)
        self.batchers: dict[Any, RequestBatcher] = {}  # actor -> what sends it requests

    async def send(self, group: str, prompt_ids: list[int], sampling_params: dict):
        """Return upstream's `TokenOutput`. After an abort (`stop_reason`) the caller goes on, on the server that the
        balancer chooses: the same one, unless it has left the run, as servers on the trainer's GPUs do in training."""
        if group not in self.acquired:
            acquire = self.client._acquire_server(group, prompt_ids=prompt_ids, sampling_params=sampling_params)
            self.acquired[group] = asyncio.create_task(acquire)
        acquired = self.acquired[group]
        _, server = await asyncio.shield(acquired)  # other requests of the group wait for this task, too
        request = {"request_id": self.client._vllm_request_id(group), "prompt_ids": prompt_ids}
        request["sampling_params"] = sampling_params
        if hasattr(server, "collect"):
            if server not in self.batchers:
                self.batchers[server] = RequestBatcher(server)
            output = await self.batchers[server].send(**request)
        else:  # upstream's own servers take one request per call
            output = await server.generate.remote(**request)
        if output.stop_reason == ABORTED and self.acquired.get(group) is acquired:
            self.release(group)
        return output

    def release(self, group: str) -> None:
        """Release the group's server, if it has one; the group's next request acquires a server again."""

        def give_back(acquired: asyncio.Task) -> None:
            if not acquired.cancelled() and acquired.exception() is None:
                server_id, _ = acquired.result()
                self.client._release_server(server_id, request_id=group)

        if acquired := self.acquired.pop(group, None):
            acquired.add_done_callback(give_back)


class LLMClientEngine(RolloutEngine):
    """The engine on a run's servers. `n_top_logprobs` and `n_entropy` need `top_logprobs_server`.

    Requests with one `request_id` go to one server until `release`. A request that is aborted during generation, for
    example by a weight sync, continues after the tokens it has: the result looks like that of one request, but new
    weights made its later tokens. `text_of` decodes tokens, to find stop texts that an abort has cut in two.
    """

    def __init__(self, client, text_of: Callable[[list[int]], str], seeds: bool = True):
        self.servers, self.text_of, self.seeds = GroupServers(client), text_of, seeds

    def release(self, request_id: str) -> None:
        """Release the server of this id; all its requests have ended."""
        self.servers.release(request_id)

    async def generate(self, request: GenerationRequest) -> Generation:
        params, stops = _sampling_params(request), list(request.stop)
        top_logprobs, entropies = [] if request.n_top_logprobs else None, [] if request.n_entropy else None
        result, group = Generation([], [], top_logprobs, entropies=entropies), request.request_id or uuid4().hex
        try:
            while True:
                params["max_tokens"] = request.max_tokens - len(result.token_ids)
                if request.seed is not None and self.seeds:
                    params["seed"] = request.seed + len(result.token_ids)
                if stops:
                    params["stop"] = stops_after(self.text_of(result.token_ids), stops)
                output = await self.servers.send(group, [*request.prompt_ids, *result.token_ids], dict(params))
                _append(result, output)
                result.stopped = bool(result.token_ids) and result.token_ids[-1] in params["stop_token_ids"]
                if result.stopped or len(result.token_ids) >= request.max_tokens:
                    break
                if self._has_ended(output.stop_reason, result.token_ids, params.get("stop"), stops):
                    break
                if not output.token_ids:  # a server that leaves or rejoins the run rejects requests at once
                    await asyncio.sleep(REJECTED_SECONDS)
        finally:
            if request.request_id is None:
                self.release(group)
        return result

    async def score(self, prompt_ids, continuation_ids, request_id=None) -> list[float]:
        if not continuation_ids:
            return []
        group = request_id or uuid4().hex
        params = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "skip_reading_prefix_cache": False}
        try:
            while True:
                output = await self.servers.send(group, [*prompt_ids, *continuation_ids], dict(params))
                # upstream appends one number for the token after the last one
                reported = [log_prob for (log_prob,) in output.extra_fields.get("prompt_logprobs", [])[:-1]]
                n_cached = output.extra_fields.get("num_cached_tokens")
                scores = last_scores(reported, n_cached, len(prompt_ids), len(continuation_ids))
                if scores is not None:
                    _check_finite(scores)
                    return scores
                if output.stop_reason == ABORTED or not output.token_ids:
                    await asyncio.sleep(REJECTED_SECONDS)
                elif params["skip_reading_prefix_cache"]:
                    raise RuntimeError(f"the server reported {len(reported)} log-probabilities of a prompt")
                else:
                    params["skip_reading_prefix_cache"] = True
        finally:
            if request_id is None:
                self.release(group)

    def _has_ended(self, reason: str, token_ids: list[int], looked_for: list[str] | None, stops: list[str]) -> bool:
        """Return whether a request has ended, and not by an abort or at the mere lookalike of a stop text's rest."""
        if reason == ABORTED or looked_for in (None, stops):
            return reason != ABORTED
        text = self.text_of(token_ids)
        return any(stop in text for stop in stops)


def _sampling_params(request: GenerationRequest) -> dict[str, Any]:
    params = {"temperature": request.temperature, "top_p": request.top_p, "top_k": request.top_k}
    params |= {"repetition_penalty": 1.0, "logprobs": True, "stop_token_ids": list(request.stop_token_ids)}
    for name in ("n_top_logprobs", "n_entropy", "extra_args"):
        params |= {name: value} if (value := getattr(request, name)) else {}
    # tags may be special tokens, which the text that is searched for stop texts must contain
    return params | ({"skip_special_tokens": False} if request.stop else {})


def _check_finite(log_probs: Sequence[float]) -> None:
    """Raise RunError if an engine's log-probabilities are not finite: what it samples is then no policy's."""
    if not all(map(math.isfinite, log_probs)):
        raise RunError(
            "the engine's log-probabilities are NaN or infinite: its weights, loaded or delivered, are not finite, or "
            "overflow in actor_rollout_ref.rollout.dtype"
        )


def _append(result: Generation, output) -> None:
    """Add a server's output to the result; raise RuntimeError if it lacks top log-probs or entropies."""
    _check_finite(output.log_probs or [])
    for name in ("top_logprobs", "entropies"):
        if (values := getattr(result, name)) is not None:
            reported = output.extra_fields.get(name, [])
            if len(reported) != len(output.token_ids):
                raise RuntimeError(
                    f"the server reported {name} of {len(reported)} tokens for {len(output.token_ids)}: they need the "
                    "rollout server of top_logprobs_server.py"
                )
            values += reported
    version = output.extra_fields.get("global_steps")
    if output.token_ids and version is not None:
        result.versions.append((len(output.token_ids), version))
    result.token_ids += list(output.token_ids)
    result.log_probs += list(output.log_probs or [])
