"""Tests of the candidates and entropies that the rollout server computes from vLLM's log-probabilities.

tests/recipe/latr/test_latr_on_vllm_on_cpu.py does the same on a real vLLM engine.
"""

import asyncio
from types import SimpleNamespace

import pytest
import torch

from tests.utils.test_entropy_estimate_on_cpu import slow
from vllm_patches import cpu_version_name

cpu_version_name.install()  # upstream's server module asks for vLLM's version
from verl.workers.rollout.replica import TokenOutput  # noqa: E402
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer  # noqa: E402
from vllm.logprobs import FlatLogprobs  # noqa: E402

from tests.workers.rollout.engines.rollout_server import make_server  # noqa: E402
from verl.workers.rollout.engines.top_logprobs_server import ranked, top_log_probs  # noqa: E402

VOCABULARY = 40


def reported(n: int, steps: int, seed: int = 0) -> tuple[list[int], FlatLogprobs, torch.Tensor]:
    """Sampled tokens, vLLM's report of the n most likely ones of each step, and all log-probabilities (steps, V)."""
    generator, flat, tokens = torch.Generator().manual_seed(seed), FlatLogprobs(), []
    sharpness = torch.arange(steps)[:, None] % 5 * 2.0
    log_probs = (torch.randn(steps, VOCABULARY, generator=generator) * sharpness).log_softmax(-1)
    for row in log_probs:
        chosen, top = int(torch.multinomial(row.exp(), 1, generator=generator)), row.topk(n)
        tokens.append(chosen)
        values = [float(row[chosen]), *top.values.tolist()]
        flat.append_fast([chosen, *top.indices.tolist()], values, [0] * (n + 1), [None] * (n + 1))
    return tokens, flat, log_probs


def test_candidates_are_ranked_and_ties_go_to_the_chosen_token():
    flat = FlatLogprobs()
    for tokens, log_probs in (([6, 9, 4, 6], [-1.0, -0.5, -1.0, -1.0]), ([1, 9, 4, 6], [-3.0, -0.5, -1.0, -1.5])):
        flat.append_fast(tokens, log_probs, [7, 1, 2, 3], [None] * 4)
    assert ranked(flat, 3) == [[(9, -0.5), (6, -1.0), (4, -1.0)], [(9, -0.5), (4, -1.0), (6, -1.5)]]
    assert top_log_probs(flat, 3).tolist() == [[-0.5, -1.0, -1.0], [-0.5, -1.0, -1.5]]
    assert top_log_probs(FlatLogprobs(), 3).shape == (0, 3)
    with pytest.raises(ValueError):
        top_log_probs(flat, 2)


class Engine:
    """vLLM's engine, as far as the server sees it: answers with one report."""

    def __init__(self):
        self.asked, self.output_processor = [], SimpleNamespace()

    async def generate(self, *, sampling_params, **options):
        self.asked.append(sampling_params)
        tokens, flat, _ = reported(sampling_params.logprobs or 1, options["tokens"])
        yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens, logprobs=flat)])


@pytest.fixture
def server(monkeypatch, model_folder):
    async def generate(self, prompt_ids, sampling_params, request_id, tokens=30, stop=()):
        assert not {"n_top_logprobs", "n_entropy"} & set(sampling_params)
        params = SimpleNamespace(logprobs=0, prompt_logprobs=None, flat_logprobs=False, stop=stop, output_kind=None)
        *_, last = [output async for output in self.engine.generate(sampling_params=params, tokens=tokens)]
        token_ids = last.outputs[0].token_ids
        log_probs = [step[token].logprob for token, step in zip(token_ids, last.outputs[0].logprobs, strict=False)]
        return TokenOutput(token_ids=token_ids, log_probs=log_probs, extra_fields={})

    monkeypatch.setattr(vLLMHttpServer, "generate", generate)
    server = make_server(monkeypatch, model_folder)
    server.engine, server.model_config = Engine(), SimpleNamespace(tokenizer=range(VOCABULARY))
    return server


@pytest.mark.parametrize("n_top_logprobs, n_entropy", [(2, 0), (0, 10), (2, 10), (10, 2), (0, VOCABULARY)])
def test_candidates_and_entropies_are_those_of_the_report(server, n_top_logprobs, n_entropy):
    params = {"temperature": 1.0, "n_top_logprobs": n_top_logprobs, "n_entropy": n_entropy}
    output = asyncio.run(server.generate([1], params, "request"))
    _, flat, log_probs = reported(max(n_top_logprobs, n_entropy), 30)
    assert output.log_probs == pytest.approx([flat.logprobs[at] for at in flat.start_indices])
    top_logprobs, entropies = (output.extra_fields.get(name) for name in ("top_logprobs", "entropies"))
    assert top_logprobs == (ranked(flat, n_top_logprobs) if n_top_logprobs else None)
    if not n_entropy:
        assert entropies is None
        return
    # from the candidates themselves, one token at a time
    top = [[log_prob for _, log_prob in step] for step in ranked(flat, n_entropy)]
    assert entropies == pytest.approx([slow(step, VOCABULARY) for step in top], abs=1e-6)
    if n_entropy == VOCABULARY:
        expected = torch.distributions.Categorical(logits=log_probs).entropy().tolist()
        assert entropies == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("stop, decodes", [([], False), (["."], True)])
def test_text_is_decoded_for_stop_texts_only(server, stop, decodes):
    asyncio.run(server.generate([1], {}, "request", stop=stop))
    asked = server.engine.asked[0]
    assert asked.flat_logprobs and asked.detokenize is decodes


async def test_requests_that_come_another_way_keep_their_text(server):
    """Such as those of the server's HTTP interface."""
    params = SimpleNamespace(logprobs=0, flat_logprobs=False, detokenize=True)
    assert [output async for output in server.engine.generate(sampling_params=params, tokens=3)]
    assert params.detokenize and not params.flat_logprobs


def test_a_report_of_too_few_tokens_is_refused(server, monkeypatch):
    generate = vLLMHttpServer.generate

    async def one_more(self, *args, **options):
        output = await generate(self, *args, **options)
        output.token_ids = [*output.token_ids, 3]
        return output

    monkeypatch.setattr(vLLMHttpServer, "generate", one_more)
    with pytest.raises(RuntimeError, match="log-probabilities of 30 tokens for 31"):
        asyncio.run(server.generate([1], {"n_entropy": 3}, "request"))
