"""A vLLM rollout server that also reports the most likely tokens and the entropy of every decode step.

Upstream's `vLLMHttpServer.generate` (verl 0.9.1) reports only the sampled token's log-probability. This server accepts
`n_top_logprobs` and `n_entropy` among the sampling parameters. It reports the `n_top_logprobs` most likely tokens of
every step as `extra_fields["top_logprobs"]`, and each step's entropy as `extra_fields["entropies"]`. The entropy is
estimated here from the `n_entropy` most likely tokens, so that only one number per token goes through Ray. Rollout
names that need the server are registered with this replica class.
"""

from contextvars import ContextVar
from functools import partial

import numpy as np
import ray
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica
from vllm.logprobs import FlatLogprobs, Logprob
from vllm.sampling_params import RequestOutputKind, SamplingParams

from verl.utils.entropy_estimate import entropies_of
from verl.workers.rollout.engines.request_batching import BatchingServer
from vllm_patches.top_logprobs_without_text import leave_out_text

NEVER = 2**31  # number of tokens between two outputs
_request: ContextVar[dict | None] = ContextVar("top_logprobs_request", default=None)


async def in_two_outputs(engine, sampling_params, **options):
    """Yield two outputs of `engine.generate`: the first token, for which upstream's server waits, and all tokens. One
    output per token would take a third of the time of the process in which vLLM serves requests. The interval between
    outputs is set per request in vLLM 0.30, and per engine in 0.24 (`wait_with_outputs`)."""
    sampling_params.output_kind = RequestOutputKind.DELTA
    if hasattr(sampling_params, "stream_interval"):
        sampling_params.stream_interval = sampling_params.max_tokens
    whole = None
    async for output in engine.generate(sampling_params=sampling_params, **options):
        completion = output.outputs[0]
        if completion.logprobs and not completion.token_ids:
            # vLLM reports the last len(token_ids) log-probabilities: after an abort without new tokens, all of them
            completion.logprobs = type(completion.logprobs)()
        if whole is None:
            whole = output
        else:
            whole.add(output, aggregate=True)
        yield whole


def wait_with_outputs(engine) -> None:
    """Let an engine of vLLM 0.24 report a request's first token, and the other tokens only when the request ends, as
    its argument `--stream-interval` does, which upstream's server would pass to every vLLM."""
    if not hasattr(SamplingParams, "stream_interval"):
        engine.output_processor.stream_interval = NEVER


class TopLogprobsEngine:
    """The server's engine, which stores the log-probabilities of requests from `TopLogprobsServer.generate`, and
    decodes their text only to search for stop texts."""

    def __init__(self, engine):
        self._engine = engine

    def __getattr__(self, name):
        return getattr(self._engine, name)

    async def generate(self, *, sampling_params, **options):
        request = _request.get()
        if request is None:
            async for output in self._engine.generate(sampling_params=sampling_params, **options):
                yield output
            return
        if request["n"]:
            sampling_params.logprobs = request["n"]
        # creating an object and a text for each of the most likely tokens would cost a third of the time
        sampling_params.flat_logprobs = sampling_params.prompt_logprobs is None
        sampling_params.detokenize = bool(sampling_params.stop)
        in_two = request["in_two"] and sampling_params.flat_logprobs
        generate = partial(in_two_outputs, self._engine) if in_two else self._engine.generate
        last = None
        async for last in generate(sampling_params=sampling_params, **options):
            yield last
        if last is not None and last.outputs and isinstance(last.outputs[0].logprobs, FlatLogprobs):
            request["logprobs"] = logprobs = last.outputs[0].logprobs
            # upstream reads only the log-probability of the sampled token, which is each step's first
            last.outputs[0].logprobs = [
                {logprobs.token_ids[at]: Logprob(logprobs.logprobs[at])} for at in logprobs.start_indices
            ]


class TopLogprobsServer(BatchingServer, vLLMHttpServer):
    """Upstream's server, which also takes `n_top_logprobs` and `n_entropy`, and many requests in one Ray call."""

    @property
    def engine(self):
        return self._top_logprobs_engine

    @engine.setter
    def engine(self, engine):
        leave_out_text()
        if engine is not None:
            wait_with_outputs(engine)
        self._top_logprobs_engine = None if engine is None else TopLogprobsEngine(engine)

    async def generate(self, prompt_ids, sampling_params, request_id, **options):
        n_top_logprobs, n_entropy = (sampling_params.pop(name, 0) for name in ("n_top_logprobs", "n_entropy"))
        n = max(n_top_logprobs, n_entropy)
        # `RequestOutput.add` would lose the tokens' routed experts, which come with the last output
        in_two = not self.config.enable_rollout_routing_replay
        request = {"n": n, "logprobs": FlatLogprobs(), "in_two": in_two}
        token = _request.set(request)
        try:
            logprobs_option = {"logprobs": True} if n else {}
            output = await super().generate(prompt_ids, {**sampling_params, **logprobs_option}, request_id, **options)
        finally:
            _request.reset(token)
        if not n:
            return output
        logprobs = request["logprobs"]
        if len(logprobs) != len(output.token_ids):
            raise RuntimeError(f"vLLM reported log-probabilities of {len(logprobs)} tokens for {len(output.token_ids)}")
        output.extra_fields |= top_of_steps(logprobs, n_top_logprobs, n_entropy, len(self.model_config.tokenizer))
        return output


def top_of_steps(logprobs: FlatLogprobs, n_top_logprobs: int, n_entropy: int, vocab_size: int) -> dict[str, list]:
    """Return `top_logprobs`, each step's most likely tokens (`ranked`), if `n_top_logprobs` > 0, and `entropies`, each
    step's entropy in nats, if `n_entropy` > 0."""
    values: dict[str, list] = {}
    if n_top_logprobs:
        values["top_logprobs"] = ranked(logprobs, n_top_logprobs)
    if n_entropy:
        top = top_log_probs(logprobs, max(n_top_logprobs, n_entropy))[:, :n_entropy]
        values["entropies"] = entropies_of(top, vocab_size).tolist()
    return values


def ranked(logprobs: FlatLogprobs, n: int) -> list[list[tuple[int, float]]]:
    """Return each step's n most likely (token, log-probability), descending; among equals the chosen token is first, as
    vLLM reports it before the most likely tokens, which may include it."""
    ranking = []
    for start, end in zip(logprobs.start_indices, logprobs.end_indices, strict=True):
        chosen = logprobs.token_ids[start]
        step = dict(zip(logprobs.token_ids[start:end], logprobs.logprobs[start:end], strict=True))
        ranking.append(sorted(step.items(), key=lambda item: (-item[1], item[0] != chosen))[:n])
    return ranking


def top_log_probs(logprobs: FlatLogprobs, n: int) -> np.ndarray:
    """Return the log-probabilities (T, n) of the n most likely tokens of each of T steps, in descending order. A step
    holds n + 1 numbers: the chosen token's, then those of the most likely tokens."""
    return np.array(logprobs.logprobs).reshape(len(logprobs), n + 1)[:, 1:]


class TopLogprobsReplica(vLLMReplica):
    """Upstream's replica with `TopLogprobsServer` as the class of its servers."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(TopLogprobsServer)

    def _get_server_name_prefix(self) -> str:
        """Return the prefix of the server's name, under which the trainer's side looks for it."""
        return f"{self.config.name}_"
