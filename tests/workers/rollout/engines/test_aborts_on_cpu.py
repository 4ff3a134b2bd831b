"""The rollout server's candidates through upstream's own `generate`, abort and resume, and vLLM's own output processor.

A stand-in only for vLLM's engine core, the process with the model: it gives a token and its log-probabilities a
millisecond, until it is paused, or all at once before anybody reads them.
"""

import asyncio
import inspect
import time

import numpy as np
import pytest

from vllm_patches import cpu_version_name

cpu_version_name.install()  # upstream's server module asks for vLLM's version
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason  # noqa: E402
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector  # noqa: E402
from vllm.v1.outputs import LogprobsLists  # noqa: E402

from tests.workers.rollout.engines.rollout_server import make_server  # noqa: E402

TEXT = "abcdefgh" * 4
TOP = [(70, -0.5), (71, -1.0), (72, -2.0)]  # candidates of every step; the sampled token is less likely than these
SAMPLED = -3.0


class Engine:
    """vLLM's `AsyncLLM`: what upstream's server calls of it."""

    def __init__(self, tokenizer):
        self.output_processor = OutputProcessor(tokenizer, log_stats=False)
        self.tokens, self.paused, self.calls = tokenizer.encode(TEXT), False, []
        self.outputs, self.at_once = 0, False

    async def generate(self, *, prompt, sampling_params, request_id, lora_request, priority):
        known = {"request_id": request_id, "external_req_id": request_id, "sampling_params": sampling_params}
        known |= {"prompt_token_ids": prompt["prompt_token_ids"], "arrival_time": 0.0}
        # the other fields without a default differ between versions
        parameters = inspect.signature(EngineCoreRequest).parameters.values()
        required = {field.name: None for field in parameters if field.default is field.empty}
        request = EngineCoreRequest(**{**required, **known})
        queue = RequestOutputCollector(sampling_params.output_kind, request_id)
        self.output_processor.add_request(request, None, None, 0, queue)
        core = asyncio.create_task(self._run(request_id, sampling_params))
        finished = False
        while not finished:
            try:
                output = queue.get_nowait() or await queue.get()
            except asyncio.CancelledError:  # where vLLM's engine aborts the request
                self.calls.append("cancelled")
                raise
            finished = output.finished
            self.outputs += 1
            yield output
        await core

    async def _run(self, request_id, params):
        for i, token in enumerate(self.tokens[: params.max_tokens]):
            if not self.at_once:
                await asyncio.sleep(0.001)
            if self.paused or request_id not in self.output_processor.request_states:
                return
            columns = [(token, SAMPLED), *TOP[: params.logprobs]]
            ids, values = (np.array([column]) for column in zip(*columns, strict=True))
            lists = LogprobsLists(ids, values, np.array([4]))
            ended = FinishReason.LENGTH if i + 1 == params.max_tokens else None
            self._give(EngineCoreOutput(request_id, [token], new_logprobs=lists, finish_reason=ended))

    def _give(self, output):
        self.output_processor.process_outputs([output])

    async def pause_generation(self, *, wait_for_inflight_requests, clear_cache):
        self.paused = True
        for request_id in list(self.output_processor.request_states):
            self._give(EngineCoreOutput(request_id, [], finish_reason=FinishReason.ABORT))

    async def resume_generation(self):
        self.paused = False

    async def wake_up(self, tags):
        self.calls.append(("wake_up", tags))

    async def reset_prefix_cache(self, reset_connector):
        self.calls.append(("reset_prefix_cache", reset_connector))


@pytest.fixture(scope="module")
def tokenizer(model_folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_folder)


@pytest.fixture
def engine(tokenizer):
    return Engine(tokenizer)


@pytest.fixture
def server(monkeypatch, model_folder, engine, request):
    server = make_server(monkeypatch, model_folder, enable_rollout_routing_replay=getattr(request, "param", False))
    server.engine = engine
    return server


def ask(server, n=2, **params):
    return server.generate([1, 2], {"logprobs": True, "n_top_logprobs": n, "max_tokens": 20, **params}, "request")


def complete(output, tokens):
    assert output.token_ids == tokens and output.log_probs == [SAMPLED] * len(tokens)
    assert output.extra_fields["top_logprobs"] == [TOP[:2]] * len(tokens)


@pytest.mark.parametrize(("server", "outputs"), [(False, 2), (True, 20)], indirect=["server"])
def test_a_whole_response(server, tokenizer, outputs):
    """Outputs are merged into two, except with routing replay: merging would lose the tokens' experts."""
    output = asyncio.run(ask(server))
    complete(output, tokenizer.encode(TEXT)[:20])
    assert output.stop_reason == "completed"
    assert server.engine.outputs == outputs


@pytest.mark.parametrize("chosen_is_likely", [False, True])
def test_outputs_before_the_first_read_are_whole(server, engine, monkeypatch, chosen_is_likely):
    if chosen_is_likely:  # then it is in vLLM's report twice
        engine.tokens = [TOP[0][0]] * 20
        monkeypatch.setitem(globals(), "SAMPLED", TOP[0][1])
    engine.at_once = True
    output = asyncio.run(ask(server))
    assert engine.outputs == 1
    complete(output, engine.tokens[:20])


def test_a_stop_text_ends_with_the_token_that_completes_it(server, tokenizer):
    """The response's text is decoded, although the candidates' is not."""
    output = asyncio.run(ask(server, stop=["cde", "zz"], skip_special_tokens=False))
    complete(output, tokenizer.encode("abcde"))
    assert output.stop_reason == "completed"


async def test_a_request_that_nobody_waits_for_is_cancelled_in_the_engine(server, engine):
    params = {"logprobs": True, "n_top_logprobs": 2, "max_tokens": 30}
    request = {"prompt_ids": [1, 2], "sampling_params": params, "request_id": "request"}
    await server.submit("worker", [(0, request)])
    while engine.outputs == 0:
        await asyncio.sleep(0.001)
    await server.give_up("worker", [0, 1])
    [(number, answer, error)] = await server.collect("worker")
    assert (number, answer) == (0, None) and "CancelledError" in error and engine.calls == ["cancelled"]
    started = time.monotonic()
    await server.abort_all_requests()
    assert time.monotonic() - started < 5, "the server waits for a request that it counts as being admitted"
    from vllm.v1.engine.async_llm import AsyncLLM

    assert "except (asyncio.CancelledError, GeneratorExit):" in inspect.getsource(AsyncLLM.generate)


async def test_aborted_requests_keep_what_they_have_and_late_ones_wait_for_the_resumption(server, engine, tokenizer):
    """Upstream's asynchronous trainers make these calls around a weight sync."""

    running = asyncio.create_task(ask(server))
    while engine.outputs == 0:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.004)
    aborted = await server.abort_all_requests()
    late = asyncio.create_task(ask(server))
    output = await running
    await asyncio.sleep(0.01)
    assert aborted["aborted_count"] == 1 and not late.done()
    await server.wake_up(tags=["weights"])
    await server.wake_up(tags=["kv_cache"])
    await server.resume_generation()
    assert output.stop_reason == "aborted" and 0 < len(output.token_ids) < 20
    complete(output, tokenizer.encode(TEXT)[: len(output.token_ids)])
    complete(await late, tokenizer.encode(TEXT)[:20])
    tags = [argument for call, argument in server.engine.calls if call == "wake_up"]
    assert tags == [["weights"], ["kv_cache"]]


@pytest.mark.parametrize("offset", range(20))
async def test_a_request_that_is_aborted_after_any_token(server, engine, tokenizer, offset):
    """Also where the abort comes without a token, right after an output."""

    running = asyncio.create_task(ask(server))
    while not engine.output_processor.request_states:
        await asyncio.sleep(0)
    state = next(iter(engine.output_processor.request_states.values()))
    while state.detokenizer.num_output_tokens() < offset:
        await asyncio.sleep(0.0005)
    await engine.pause_generation(wait_for_inflight_requests=False, clear_cache=True)
    output = await running
    assert output.stop_reason == "aborted" and len(output.token_ids) in (offset, offset + 1)
    complete(output, tokenizer.encode(TEXT)[: len(output.token_ids)])
