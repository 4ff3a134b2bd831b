"""The engine of group rollouts on `transformers`, and what all engines share."""

import asyncio

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from verl.utils.entropy_estimate import entropies_of
from verl.workers.rollout.engines.interface import GenerationRequest
from verl.workers.rollout.engines.local_transformers import TransformersEngine, restricted
from verl.workers.rollout.tree_rollout import GroupEngine


@pytest.fixture(scope="module")
def model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 30, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    config = Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=2, initializer_range=0.4)
    return Qwen2ForCausalLM(config).double().eval()


def generate(engine, prompt, **options):
    request = GenerationRequest(prompt, **{"max_tokens": 8, "stop_token_ids": [], **options})
    return asyncio.run(engine.generate(request))


def test_greedy_tokens_candidates_and_log_probs_are_the_models(model):
    actual = generate(TransformersEngine(model), [1, 2, 3], temperature=0, n_top_logprobs=3)
    sequence = [1, 2, 3]
    for token, log_prob, top_logprobs in zip(actual.token_ids, actual.log_probs, actual.top_logprobs, strict=True):
        with torch.no_grad():
            raw = model(torch.tensor([sequence])).logits[0, -1].log_softmax(-1)
        values, tokens = raw.topk(3)
        assert token == int(raw.argmax()) == top_logprobs[0][0]
        assert log_prob == pytest.approx(float(raw.max()))
        assert [t for t, _ in top_logprobs] == tokens.tolist()
        assert [p for _, p in top_logprobs] == pytest.approx(values.tolist())
        sequence.append(token)


@pytest.mark.parametrize("temperature", [0, 0.7])
def test_entropies_of_all_tokens_are_the_raw_distributions(model, temperature):
    vocabulary = range(30)  # all that the engine needs of a tokenizer here is its length
    made = generate(TransformersEngine(model, vocabulary), [1, 2, 3], temperature=temperature, n_entropy=30, seed=0)
    with torch.no_grad():
        logits = model(torch.tensor([[1, 2, 3, *made.token_ids]])).logits[0, 2:-1]
    expected = torch.distributions.Categorical(logits=logits).entropy()
    assert made.entropies == pytest.approx(expected.tolist()) and made.top_logprobs is None


def test_entropies_of_the_first_tokens_are_those_of_the_candidates(model):
    made = generate(TransformersEngine(model, range(40)), [1, 2, 3], n_top_logprobs=5, n_entropy=5, seed=0)
    top = np.array([[log_prob for _, log_prob in step] for step in made.top_logprobs])
    assert made.entropies == pytest.approx(entropies_of(top, 40).tolist())


def test_a_stop_token_ends_the_generation_and_is_part_of_it(model):
    free = generate(TransformersEngine(model), [1, 2, 3], temperature=0)
    stop = free.token_ids[3]
    actual = generate(TransformersEngine(model), [1, 2, 3], temperature=0, stop_token_ids=[stop])
    assert actual.stopped and actual.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]


def test_sampling_is_seeded_and_follows_the_temperature(model):
    engine = TransformersEngine(model)
    assert generate(engine, [5], seed=3) == generate(engine, [5], seed=3) != generate(engine, [5], seed=4)
    with torch.no_grad():
        expected = (model(torch.tensor([[5]])).logits[0, -1] / 0.7).softmax(-1)
    drawn = [generate(engine, [5], seed=i, temperature=0.7, max_tokens=1) for i in range(500)]
    counts = torch.bincount(torch.tensor([one.token_ids[0] for one in drawn]), minlength=30)
    assert (counts / 500 - expected).abs().max() < 0.08
    assert drawn[0].log_probs[0] == pytest.approx(float(expected[drawn[0].token_ids[0]].log()))


def test_top_k_and_top_p_by_hand():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert restricted(logits, 1.0, 2).isfinite().tolist() == [True, True, False, False]
    assert restricted(logits, 0.6, -1).isfinite().tolist() == [True, True, False, False]
    assert restricted(logits, 0.5, -1).isfinite().tolist() == [True, False, False, False]
    assert torch.equal(restricted(logits, 1.0, -1), logits)


def test_the_samplers_settings_of_a_prompt_temper_every_token(model):
    """T' = T (1 + tau h), h from the entropy of the raw logits; greedy requests are not touched."""
    settings = {"temperature_tau": 0.5, "median": 0.0, "std": 1.0, "scale_pos": 2.0, "scale_neg": 0.5}
    options = {"temperature": 1.0, "seed": 3, "extra_args": {"adaptive_temperature": settings}}
    made = generate(GroupEngine(TransformersEngine(model), options), [1, 2, 3], temperature=1.0, seed=3)
    with torch.no_grad():
        logits = model(torch.tensor([[1, 2, 3, *made.token_ids]])).logits[0, 2:-1]
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    z = entropy.log()
    h = (z * torch.where(z > 0, 2.0, 0.5)).clamp(-1, 1)
    expected = (logits / (1 + 0.5 * h).unsqueeze(-1)).log_softmax(-1)
    of_tokens = expected.gather(-1, torch.tensor(made.token_ids).unsqueeze(-1)).squeeze(-1)
    assert made.log_probs == pytest.approx(of_tokens.tolist(), abs=1e-5)
    greedy = generate(TransformersEngine(model), [1, 2, 3], temperature=0)
    assert greedy == generate(GroupEngine(TransformersEngine(model), options), [1, 2, 3], temperature=0)
