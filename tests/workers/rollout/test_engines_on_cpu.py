"""The two engines of group rollouts. The vLLM one's client is a stand-in only to abort at a chosen token."""

import asyncio
from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from verl.workers.rollout.group_rollout import VersionRecorder, group_rollout_class
from verl.workers.rollout.llm_client_engine import LLMClientEngine
from verl.workers.rollout.rollout_engine import TransformersEngine, restricted
from vllm_patches import cpu_version_name


@pytest.fixture(scope="module")
def model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 30, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    config = Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=2, initializer_range=0.4)
    return Qwen2ForCausalLM(config).double().eval()


def generate(engine, prompt, **options):
    return asyncio.run(engine.generate(prompt, **{"max_tokens": 8, "stop_token_ids": [], **options}))


def test_greedy_tokens_candidates_and_log_probs_are_the_models(model):
    found = generate(TransformersEngine(model), [1, 2, 3], temperature=0, n_candidates=3)
    sequence = [1, 2, 3]
    for token, log_prob, candidates in zip(found.token_ids, found.log_probs, found.candidates, strict=True):
        with torch.no_grad():
            raw = model(torch.tensor([sequence])).logits[0, -1].log_softmax(-1)
        values, tokens = raw.topk(3)
        assert token == int(raw.argmax()) == candidates[0][0]
        assert log_prob == pytest.approx(float(raw.max()))
        assert [t for t, _ in candidates] == tokens.tolist()
        assert [p for _, p in candidates] == pytest.approx(values.tolist())
        sequence.append(token)


def test_a_stop_token_ends_the_generation_and_is_part_of_it(model):
    free = generate(TransformersEngine(model), [1, 2, 3], temperature=0)
    stop = free.token_ids[3]
    found = generate(TransformersEngine(model), [1, 2, 3], temperature=0, stop_token_ids=[stop])
    assert found.stopped and found.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]


def test_sampling_is_seeded_and_follows_the_temperature(model):
    engine = TransformersEngine(model)
    assert generate(engine, [5], seed=3) == generate(engine, [5], seed=3) != generate(engine, [5], seed=4)
    with torch.no_grad():
        expected = (model(torch.tensor([[5]])).logits[0, -1] / 0.7).softmax(-1)
    drawn = [generate(engine, [5], seed=i, temperature=0.7, max_tokens=1) for i in range(2000)]
    counts = torch.bincount(torch.tensor([one.token_ids[0] for one in drawn]), minlength=30)
    assert (counts / 2000 - expected).abs().max() < 0.04
    assert drawn[0].log_probs[0] == pytest.approx(float(expected[drawn[0].token_ids[0]].log()))


def test_top_k_and_top_p_by_hand():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert restricted(logits, 1.0, 2).isfinite().tolist() == [True, True, False, False]
    assert restricted(logits, 0.6, -1).isfinite().tolist() == [True, True, False, False]
    assert restricted(logits, 0.5, -1).isfinite().tolist() == [True, False, False, False]
    assert torch.equal(restricted(logits, 1.0, -1), logits)


class AbortingClient:
    """Answers 1, 2, 3, … and is aborted after `abort_at` tokens, once; a new weights' version then."""

    def __init__(self, abort_at: int):
        self.abort_at, self.requests = abort_at, []

    async def generate(self, request_id, *, prompt_ids, sampling_params):
        self.requests.append((request_id, list(prompt_ids), dict(sampling_params)))
        version = len(self.requests)
        n = self.abort_at if version == 1 else sampling_params["max_tokens"]
        tokens = [len(prompt_ids) + i for i in range(n)]
        candidates = [[(token, -0.1), (0, -2.0)] for token in tokens]
        extra = {"min_global_steps": version, "max_global_steps": version, "candidates": candidates}
        reason = "aborted" if version == 1 else "completed"
        return SimpleNamespace(token_ids=tokens, log_probs=[-0.1] * n, stop_reason=reason, extra_fields=extra)


@pytest.mark.parametrize("abort_at", [0, 3])
def test_an_aborted_request_goes_on_from_its_tokens(abort_at):
    client = AbortingClient(abort_at)
    recorder = VersionRecorder(LLMClientEngine(client))
    found = generate(recorder, [7, 7], n_candidates=2, seed=5, request_id="group")
    assert found.token_ids == [2, 3, 4, 5, 6, 7, 8, 9] and len(found.log_probs) == len(found.candidates) == 8
    assert [request for request, _, _ in client.requests] == ["group", "group"]
    assert client.requests[1][1] == [7, 7, *found.token_ids[:abort_at]]
    assert client.requests[1][2]["max_tokens"] == 8 - abort_at
    assert found.info == recorder.versions() == {"min_global_steps": 1, "max_global_steps": 2}


def test_candidates_are_ranked_and_ties_go_to_the_chosen_token():
    cpu_version_name.install()  # upstream's server module asks for vLLM's version
    from vllm.logprobs import FlatLogprobs

    from verl.workers.rollout.candidate_server import ranked

    flat = FlatLogprobs()
    for tokens, log_probs in (([6, 9, 4, 6], [-1.0, -0.5, -1.0, -1.0]), ([1, 9, 4, 6], [-3.0, -0.5, -1.0, -1.5])):
        flat.append_fast(tokens, log_probs, [7, 1, 2, 3], [None] * 4)
    assert ranked(flat, 3) == [[(9, -0.5), (6, -1.0), (4, -1.0)], [(9, -0.5), (4, -1.0), (6, -1.5)]]


def test_rollout_names():
    assert group_rollout_class("vllm") is None
    assert group_rollout_class("kt").__name__ == "KTRollout"


def test_nothing_runs_on_after_a_failure():
    import asyncio

    from verl.workers.rollout.rollout_engine import gather_or_cancel

    ended = []

    async def works(seconds):
        try:
            await asyncio.sleep(seconds)
        finally:
            ended.append(seconds)
        return seconds

    async def fails():
        await asyncio.sleep(0.01)
        raise ValueError("no such token")

    assert asyncio.run(gather_or_cancel(works(0.02), works(0.01))) == [0.02, 0.01]
    ended.clear()
    with pytest.raises(ValueError, match="no such token"):
        asyncio.run(gather_or_cancel(works(60), fails(), works(50)))
    assert sorted(ended) == [50, 60]
