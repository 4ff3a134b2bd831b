"""vLLM's rollout server with the most likely tokens or the entropy of every decode step.

Upstream's `vLLMHttpServer.generate` (verl 0.9.1) reports the sampled token's log-probability only. This one takes
`n_top_logprobs` and `n_entropy` among the sampling parameters. It reports the `n_top_logprobs` most likely tokens of
every step as `extra_fields["top_logprobs"]`, and each step's entropy, estimated here from the `n_entropy` most likely
tokens, as `extra_fields["entropies"]`: one number for each token goes through Ray. Rollout names that need it are
registered with this replica class.
"""

from contextvars import ContextVar
from functools import partial

import numpy as np
import ray
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica
from vllm.logprobs import FlatLogprobs, Logprob
from vllm.sampling_params import RequestOutputKind, SamplingParams

from verl.utils.entropy_estimate import entropies_of
from verl.workers.rollout.engines.request_batching import ExchangeServer
from vllm_patches.top_logprobs_without_text import leave_out_text

N_TOP_LOGPROBS, TOP_LOGPROBS = "n_top_logprobs", "top_logprobs"
N_ENTROPY, ENTROPIES = "n_entropy", "entropies"
NEVER = 2**31  # tokens between two outputs
_request: ContextVar[dict | None] = ContextVar("top_logprobs_request", default=None)


async def in_two_outputs(engine, sampling_params, **options):
    """Yield two outputs of `engine.generate`: the first token, for which upstream's server waits, and all tokens.

    An output for each token would take a third of the time of vLLM's process beside the engine. The interval between
    outputs is the request's in vLLM 0.30, and the engine's in 0.24 (`wait_with_outputs`).
    """
    sampling_params.output_kind = RequestOutputKind.DELTA
    if hasattr(sampling_params, "stream_interval"):
        sampling_params.stream_interval = sampling_params.max_tokens
    whole = None
    async for output in engine.generate(sampling_params=sampling_params, **options):
        completion = output.outputs[0]
        if completion.logprobs and not completion.token_ids:
            # vLLM reports the last len(token_ids) log-probabilities: those of all tokens, if an abort comes without any
            completion.logprobs = type(completion.logprobs)()
        if whole is None:
            whole = output
        else:
            whole.add(output, aggregate=True)
        yield whole


def wait_with_outputs(engine) -> None:
    """Let an engine of vLLM 0.24 give a request's first token and then the rest when it ends.

    The interval is an argument of this engine (`--stream-interval`), which upstream's server would pass to every vLLM.
    """
    if not hasattr(SamplingParams, "stream_interval"):
        engine.output_processor.stream_interval = NEVER


class TopLogprobsEngine:
    """The server's engine; requests of `TopLogprobsServer.generate` leave their log-probabilities behind.

    Nobody reads their text: it is decoded where stop texts are looked for in it.
    """

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
        # an object and a text for each of the most likely tokens of every step would cost a third of the time
        sampling_params.flat_logprobs = sampling_params.prompt_logprobs is None
        sampling_params.detokenize = bool(sampling_params.stop)
        in_two = request["in_two"] and sampling_params.flat_logprobs
        generate = partial(in_two_outputs, self._engine) if in_two else self._engine.generate
        last = None
        async for last in generate(sampling_params=sampling_params, **options):
            yield last
        if last is not None and last.outputs and isinstance(last.outputs[0].logprobs, FlatLogprobs):
            request["logprobs"] = flat = last.outputs[0].logprobs
            # what upstream reads: the sampled token's
            last.outputs[0].logprobs = [{flat.token_ids[at]: Logprob(flat.logprobs[at])} for at in flat.start_indices]


class TopLogprobsServer(ExchangeServer, vLLMHttpServer):
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
        n_top_logprobs, n_entropy = (sampling_params.pop(name, 0) for name in (N_TOP_LOGPROBS, N_ENTROPY))
        n = max(n_top_logprobs, n_entropy)
        # `RequestOutput.add` loses the experts of the tokens, which come with the last output
        in_two = not self.config.enable_rollout_routing_replay
        request = {"n": n, "logprobs": FlatLogprobs(), "in_two": in_two}
        token = _request.set(request)
        try:
            wanted = {"logprobs": True} if n else {}
            output = await super().generate(prompt_ids, {**sampling_params, **wanted}, request_id, **options)
        finally:
            _request.reset(token)
        if not n:
            return output
        flat = request["logprobs"]
        if len(flat) != len(output.token_ids):
            raise RuntimeError(f"vLLM reported log-probabilities of {len(flat)} tokens for {len(output.token_ids)}")
        output.extra_fields |= top_of_steps(flat, n_top_logprobs, n_entropy, len(self.model_config.tokenizer))
        return output


def top_of_steps(flat: FlatLogprobs, n_top_logprobs: int, n_entropy: int, vocab_size: int) -> dict[str, list]:
    """Return the most likely tokens and the entropy of each step, whichever are asked for by numbers above 0."""
    values: dict[str, list] = {}
    if n_top_logprobs:
        values[TOP_LOGPROBS] = ranked(flat, n_top_logprobs)
    if n_entropy:
        top = top_log_probs(flat, max(n_top_logprobs, n_entropy))[:, :n_entropy]
        values[ENTROPIES] = entropies_of(top, vocab_size).tolist()
    return values


def ranked(flat: FlatLogprobs, n: int) -> list[list[tuple[int, float]]]:
    """For each token n (token, log-probability), the most likely first; among equals the chosen token comes first.

    vLLM gives the chosen token, then the most likely ones in order, of which it may be one.
    """
    ranking = []
    for start, end in zip(flat.start_indices, flat.end_indices, strict=True):
        chosen = flat.token_ids[start]
        step = dict(zip(flat.token_ids[start:end], flat.logprobs[start:end], strict=True))
        ranking.append(sorted(step.items(), key=lambda item: (-item[1], item[0] != chosen))[:n])
    return ranking


def top_log_probs(flat: FlatLogprobs, n: int) -> np.ndarray:
    """(T, n), descending: the log-probabilities of the n most likely tokens of each step, which has the chosen one's
    before them. Raises ValueError where a step has another number of them."""
    return np.array(flat.logprobs).reshape(len(flat), n + 1)[:, 1:]


class TopLogprobsReplica(vLLMReplica):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(TopLogprobsServer)

    def _get_server_name_prefix(self) -> str:
        """The trainer's side looks for the server under the rollout's name."""
        return f"{self.config.name}_"
