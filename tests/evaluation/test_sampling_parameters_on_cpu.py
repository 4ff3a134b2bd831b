"""A model's generation_config.json does not change how an evaluation samples: vLLM's request classes are the oracle."""

import asyncio

import pytest

from tests.evaluation.toy_server import ToyModel, toy_server
from verl.evaluation.model.server import ChatModel, ServerEngine, clients_of
from verl.workers.rollout.engines.interface import GenerationRequest

# all sampling parameters that vLLM takes from the file, with values that nobody asks for
GENERATION_CONFIG = {"repetition_penalty": 1.3, "temperature": 0.2, "top_k": 3, "top_p": 0.4, "min_p": 0.2}


def asked_of_a_server(ask):
    model = ToyModel(verdict="fine")
    with toy_server(model) as url:
        asyncio.run(ask(url, clients_of(url, "", 1)))
    return model.asked[-1]


def tokens(url, clients):
    options = {"max_tokens": 8, "temperature": 0.9, "top_p": 0.8, "top_k": 50, "seed": 1, "stop_token_ids": [1]}
    prompt = ToyModel().tokenizer("1 + 2").input_ids
    return ServerEngine(clients, "toy", 1).generate(GenerationRequest(prompt, **options))


def chat(beyond_openai, **more):
    sampling = {"max_tokens": 8, "temperature": 0.9, "seed": 1} | more
    messages = [{"role": "user", "content": "1 + 2"}]
    return lambda url, clients: ChatModel(clients, "toy", 1, beyond_openai).ask(messages, **sampling)


def test_completions_are_sampled_as_asked():
    pytest.importorskip("vllm", reason="vLLM decides what a request means")
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    request = CompletionRequest(**asked_of_a_server(tokens))
    sampling = request.to_sampling_params(8, GENERATION_CONFIG)
    assert sampling == request.to_sampling_params(8, {})
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.9, 0.8, 50)
    assert (sampling.repetition_penalty, sampling.min_p) == (1.0, 0.0)


@pytest.mark.parametrize("more", [{}, {"top_p": 0.7, "top_k": 20, "repetition_penalty": 1.1, "stop": ["END"]}])
def test_chats_are_sampled_as_asked(more):
    pytest.importorskip("vllm", reason="vLLM decides what a request means")
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    request = ChatCompletionRequest(**asked_of_a_server(chat(True, **more)))
    sampling = request.to_sampling_params(8, GENERATION_CONFIG)
    assert sampling == request.to_sampling_params(8, {})
    assert (sampling.temperature, sampling.top_p) == (0.9, more.get("top_p", 1.0))
    assert sampling.top_k in (more.get("top_k", -1), 0)
    assert sampling.repetition_penalty == more.get("repetition_penalty", 1.0)
    assert sampling.stop == more.get("stop", [])


def test_another_server_is_asked_for_nothing_that_it_may_refuse():
    asked = asked_of_a_server(chat(False, top_p=0.7, top_k=20))
    assert set(asked) == {"model", "messages", "max_completion_tokens", "temperature", "top_p", "seed"}
    assert asked["max_completion_tokens"] == 8 and asked["top_p"] == 0.7
