"""Group rollouts on rollout servers that are real Ray actors behind upstream's own client and load balancer.

The servers answer with a tiny model in their process; the load balancer is upstream's, with a counter.
"""

import asyncio
import inspect
import random
import sys
from collections import Counter
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import ray
import torch
from omegaconf import OmegaConf
from transformers import Qwen2Config, Qwen2ForCausalLM
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.router import GlobalRequestLoadBalancer, get_router_handle

from tests.configs import composed
from tests.forked import ray_of_forks
from tests.recipe.arpo import toy_agent
from verl.utils.fault_reports import RunError
from verl.workers.rollout.engines import vllm_server
from verl.workers.rollout.engines.interface import GenerationRequest
from verl.workers.rollout.engines.local_transformers import TransformersEngine
from verl.workers.rollout.engines.request_batching import BatchingServer
from verl.workers.rollout.engines.vllm_server import LLMClientEngine
from verl.workers.rollout.prompt_task import PromptTask
from verl.workers.rollout.trajectory_tree import TREE_METRICS
from verl.workers.rollout.tree_rollout import TreeRollout

TOKENIZER = toy_agent.TOKENIZER


class Balancer(GlobalRequestLoadBalancer):
    def reset(self, servers):
        super().__init__(servers)
        self.calls = Counter()

    def acquire_server(self, request_id):
        self.calls["acquire"] += 1
        return super().acquire_server(request_id)

    def release_server(self, server_id, request_id=None):
        self.calls["release"] += 1
        return super().release_server(server_id, request_id)

    def counted(self) -> tuple[dict, int]:
        return dict(self.calls), self.get_total_inflight()


class UpstreamServer:
    """The `generate` of upstream's rollout server on an engine of ours."""

    def reset(self, engine, aborts, rejects=False):
        """Let `engine` answer; each of the first answers is cut short after so many tokens as `aborts` says."""
        self.engine, self.aborts, self.rejects, self.asked, self.version = engine, list(aborts), rejects, 0, 1

    async def generate(self, prompt_ids, sampling_params, request_id):
        self.asked += 1
        if self.rejects:
            return TokenOutput(token_ids=[], log_probs=None, stop_reason="aborted", extra_fields={"global_steps": 1})
        for name in ("repetition_penalty", "logprobs", "skip_special_tokens"):
            sampling_params.pop(name, None)
        version, reason, keep = self.version, "completed", None
        if self.aborts:
            self.version, reason, keep = version + 1, "aborted", self.aborts.pop(0)
        made = await self.engine.generate(GenerationRequest(prompt_ids, **sampling_params))
        if keep is not None and keep >= len(made.token_ids):  # the request ends before it can be aborted
            reason = "completed"
        reported = {"top_logprobs": made.top_logprobs, "entropies": made.entropies}
        return TokenOutput(
            token_ids=made.token_ids[:keep],
            log_probs=made.log_probs[:keep],
            stop_reason=reason,
            extra_fields={"global_steps": version}
            | {name: values[:keep] for name, values in reported.items() if values is not None},
        )

    async def count(self) -> int:
        return self.asked


@ray.remote
class Server(BatchingServer, UpstreamServer):
    """A stand-in for `TopLogprobsServer`."""


@pytest.fixture(scope="module")
def model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": len(TOKENIZER), "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config = Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=2, initializer_range=1.0)
    return Qwen2ForCausalLM(config).eval()


@pytest.fixture(scope="module")
def actors():
    """The load balancer and two servers: processes that need some seconds to start."""
    # a worker cannot import tests: upstream's wheel has a package of that name
    for name in (__name__, toy_agent.__name__):
        ray.cloudpickle.register_pickle_by_value(sys.modules[name])
    with ray_of_forks(num_cpus=2, log_to_driver=False, logging_level="ERROR"):
        servers = [Server.options(num_cpus=0).remote() for _ in "ab"]
        yield get_router_handle(servers={}, load_balancer_cls=Balancer), servers


class Stack:
    """The servers behind the load balancer, as new, and our engine for them."""

    def __init__(self, actors, engine, client=LLMServerClient, aborts=()):
        self.balancer, servers = actors
        self.servers = {f"server {i}": server for i, server in enumerate(servers)}
        ray.get([server.reset.remote(engine, aborts) for server in servers])
        ray.get(self.balancer.reset.remote(self.servers))
        config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"full_determinism": False}}})
        self.engine = LLMClientEngine(client(config, self.balancer), TOKENIZER.decode)

    def counted(self) -> tuple[dict, int]:
        """Calls of the balancer, and what it believes to be in flight."""
        return ray.get(self.balancer.counted.remote())

    def requests(self) -> list[int]:
        """Return the number of requests that each server got."""
        return ray.get([server.count.remote() for server in self.servers.values()])


def generate(engine, prompt, **options):
    options = {"max_tokens": 8, "stop_token_ids": [], "temperature": 0} | options
    return engine.generate(GenerationRequest(prompt, **options))


LIBRARY = {"class_path": f"{toy_agent.__name__}.Library", "params": {}}
ROLLOUTS = {
    "latr": {"prompt_length": 40, "response_length": 24}
    | {"kt": {"chunk_size": 2, "prob_filter_abs_thres": 0.02, "prob_filter_rel_thres": 0.9}},
    "arpo": {
        "environment": "tools",
        "initial_rollouts": 2,
        "branch_probability": 1.0,
        "entropy_tokens": 4,
        "tools": {"tool_instances": {"search": LIBRARY}},
    },
}


def rollout_of(tree: str, engine):
    config = composed("explore", "hardware=cpu", f"tree={tree}", "trainer.tree_freq=1")
    OmegaConf.set_struct(config, False)
    config.actor_rollout_ref.rollout.update({"seed": 1, "n": 6})
    config.actor_rollout_ref.rollout.merge_with(ROLLOUTS[tree])

    async def initial_tokens(messages, tools=None):
        return TOKENIZER.encode(messages[0]["content"])

    return TreeRollout(config, SimpleNamespace(ct_build_initial_tokens=initial_tokens), engine, TOKENIZER)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_engine_whose_weights_are_not_finite_is_named(actors, model, value):
    spoilt = deepcopy(model)
    spoilt.lm_head.weight.data[0] = value
    stack = Stack(actors, TransformersEngine(spoilt))
    with pytest.raises(RunError, match="the engine's log-probabilities are NaN or infinite: its weights"):
        asyncio.run(generate(stack.engine, [1, 2]))
    assert stack.counted()[1] == 0, "the server is given back"


def test_groups_are_spread_evenly_and_a_request_of_no_group_gives_its_server_back(actors, model):
    stack = Stack(actors, TransformersEngine(model))

    async def groups():
        requests = [generate(stack.engine, [1, i], request_id=f"group {i}") for i in range(8) for _ in range(5)]
        await asyncio.gather(*requests)
        in_flight = stack.counted()
        for i in range(8):
            stack.engine.release(f"group {i}")
        stack.engine.release("never asked for anything")
        await generate(stack.engine, [5])
        return in_flight

    assert asyncio.run(groups()) == ({"acquire": 8}, 8)
    assert stack.counted() == ({"acquire": 9, "release": 9}, 0)
    assert sorted(stack.requests()) == [20, 21]


@pytest.mark.parametrize("client", [LLMServerClient, FullyAsyncLLMServerClient])
@pytest.mark.parametrize("abort_at", [0, 3])
def test_an_aborted_request_goes_on_from_its_tokens(actors, model, abort_at, client, monkeypatch):
    """Upstream's asynchronous trainers abort requests like this; their client would keep nothing but the tokens."""
    monkeypatch.setattr(vllm_server, "REJECTED_SECONDS", 0.01)
    inside = TransformersEngine(model, TOKENIZER)
    stack = Stack(actors, inside, client=client, aborts=[abort_at])
    options = {"n_top_logprobs": 2, "n_entropy": 5, "request_id": "group"}
    made = asyncio.run(generate(stack.engine, [7, 7], **options))
    whole = asyncio.run(generate(inside, [7, 7], **options))
    assert made.token_ids == whole.token_ids and made.log_probs == pytest.approx(whole.log_probs, abs=1e-4)
    assert made.entropies == pytest.approx(whole.entropies, abs=1e-4) and len(made.entropies) == 8
    assert [[t for t, _ in step] for step in made.top_logprobs] == [[t for t, _ in step] for step in whole.top_logprobs]
    assert made.versions == ([(abort_at, 1)] if abort_at else []) + [(8 - abort_at, 2)]
    assert sorted(stack.requests()) == [0, 2], "it stays where its prefix is cached"
    assert stack.counted() == ({"acquire": 2, "release": 1}, 1)


@pytest.mark.slow
@pytest.mark.parametrize("tree", ["latr", "arpo"])
def test_an_interrupted_tree_goes_on_where_it_was(tree, actors, model, monkeypatch):
    """Every token follows from those before it here, so that it must be the tree of a run without interruptions."""
    monkeypatch.setattr(vllm_server, "REJECTED_SECONDS", 0.01)
    whole_greedy = {"return_on_full": False, "force_return_step": -1, "fill_return_sequences": False}
    monkeypatch.setitem(ROLLOUTS, "latr", ROLLOUTS["latr"] | {"kt": ROLLOUTS["latr"]["kt"] | whole_greedy})
    monkeypatch.setitem(ROLLOUTS, "arpo", ROLLOUTS["arpo"] | {"prompt_length": 40, "response_length": 300})
    inside = toy_agent.ToyPolicy() if tree == "arpo" else TransformersEngine(model, TOKENIZER)
    lengths = random.Random(1)
    aborts = [lengths.randrange(4) for _ in range(30)]
    interrupted = rollout_of(tree, Stack(actors, inside, FullyAsyncLLMServerClient, aborts).engine)
    alone = rollout_of(tree, inside)
    task = PromptTask({"uid": "u", "index": 0, "raw_prompt": [{"role": "user", "content": "assistant\n"}]}, step=1)
    made, same = (
        asyncio.run(rollout.run(task, 6, {"temperature": 1.0, "top_p": 1.0, "top_k": -1}))
        for rollout in (interrupted, alone)
    )
    assert [row.response_ids for row in made] == [row.response_ids for row in same]
    assert [row.token_fields["segment_ids"] for row in made] == [row.token_fields["segment_ids"] for row in same]
    spans = [(row.extra_fields["min_global_steps"], row.extra_fields["max_global_steps"]) for row in made]
    assert all(1 <= oldest <= newest <= 31 for oldest, newest in spans) and any(old < new for old, new in spans)
    assert made[0].extra_fields[TREE_METRICS]["weight_versions"] > 1
    if tree == "latr":
        assert {oldest for oldest, _ in spans} == {1}, "all begin with tokens of the first request"
    else:
        calls = [rollout.environment.tools.tools["search"].asked for rollout in (interrupted, alone)]
        assert sorted(calls[0]) == sorted(calls[1]) and calls[1], "no tool is called again"


STOP = "</search>"


@pytest.mark.parametrize("cut", range(1, len(STOP)))
def test_a_stop_text_that_an_abort_has_cut_in_two_still_ends_a_request(actors, cut):
    """A letter is a token; the server looks for stop texts in what it makes after the abort."""
    before = len(toy_agent.encode("x<think>so</think><search>x")) + cut
    stack = Stack(actors, toy_agent.ToyPolicy(), aborts=[before])
    options = {"max_tokens": 200, "seed": 1, "stop": [STOP], "temperature": 1.0}
    made = asyncio.run(generate(stack.engine, toy_agent.encode("assistant\n"), **options))
    text = TOKENIZER.decode(made.token_ids)
    assert text.endswith(STOP) and text.count(STOP) == 1 and sum(stack.requests()) == 2


def test_a_lookalike_of_a_stop_texts_rest_ends_no_request(actors):
    """The server is aborted at `x<think>s` and then looks for the `c` of `sc`, which it finds in `<search>`."""
    stack = Stack(actors, toy_agent.ToyPolicy(), aborts=[3])
    options = {"max_tokens": 200, "seed": 1, "stop": ["sc", "</search>"], "temperature": 1.0}
    made = asyncio.run(generate(stack.engine, toy_agent.encode("assistant\n"), **options))
    assert TOKENIZER.decode(made.token_ids).endswith("</search>") and sum(stack.requests()) == 3


def test_an_aborted_group_asks_for_a_server_once_and_its_seeds_go_on(actors, model):
    stack = Stack(actors, TransformersEngine(model), aborts=[2] * 4)

    async def group():
        requests = [generate(stack.engine, [i], request_id="group", temperature=1.0, seed=5) for i in range(4)]
        made = await asyncio.gather(*requests)
        stack.engine.release("group")
        return made

    made = asyncio.run(group())
    first, rest = TransformersEngine(model), {"temperature": 1.0, "max_tokens": 6, "seed": 7}
    for i, one in enumerate(made):
        begun = asyncio.run(generate(first, [i], temperature=1.0, seed=5)).token_ids[:2]
        assert one.token_ids == begun + asyncio.run(generate(first, [i, *begun], **rest)).token_ids
    assert stack.counted() == ({"acquire": 2, "release": 2}, 0)


def test_a_group_goes_on_elsewhere_when_its_server_has_left(actors, model, monkeypatch):
    """A trainer's own servers first leave the balancer, and then reject every request."""
    monkeypatch.setattr(vllm_server, "REJECTED_SECONDS", 0.01)
    stack = Stack(actors, TransformersEngine(model))

    async def group():
        before = await generate(stack.engine, [3], request_id="group")
        (left,) = [name for name, n in zip(stack.servers, stack.requests(), strict=True) if n]
        await stack.balancer.remove_servers.remote([left])
        await stack.servers[left].reset.remote(None, [], rejects=True)
        after = await asyncio.gather(*(generate(stack.engine, [3], request_id="group") for _ in range(3)))
        stack.engine.release("group")
        return before, after

    before, after = asyncio.run(group())
    assert all(one.token_ids == before.token_ids for one in after)
    assert stack.requests() == [3, 3], "three were rejected"
    assert stack.counted() == ({"acquire": 2, "release": 2}, 0)


def test_a_group_that_is_given_up_holds_no_server(actors, model):
    stack = Stack(actors, TransformersEngine(model))

    async def group():
        asking = asyncio.create_task(generate(stack.engine, [3], request_id="group", max_tokens=200))
        await asyncio.sleep(0)  # the balancer has not answered yet
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        acquired = stack.engine.servers.acquired["group"]
        stack.engine.release("group")
        await acquired
        await asyncio.sleep(0)

    asyncio.run(group())
    assert stack.counted() == ({"acquire": 1, "release": 1}, 0)


def test_a_server_of_upstreams_own_is_asked_request_by_request(model):
    server, inside = UpstreamServer(), TransformersEngine(model)
    server.reset(inside, [])

    class Client:
        async def _acquire_server(self, group, **_):
            return "server", SimpleNamespace(generate=SimpleNamespace(remote=server.generate))

        def _release_server(self, server_id, request_id):
            pass

        def _vllm_request_id(self, group):
            return group

    async def group():
        return await asyncio.gather(*(generate(engine, [i], request_id="group") for i in range(3)))

    engine = LLMClientEngine(Client(), TOKENIZER.decode)
    made = asyncio.run(group())
    assert [part.token_ids for part in made] == [asyncio.run(generate(inside, [i])).token_ids for i in range(3)]
    assert server.asked == 3 and not engine.servers.batchers


def test_a_server_without_entropies_is_named(actors, model):
    class Plain(TransformersEngine):
        async def generate(self, request):
            return await super().generate(replace(request, n_entropy=0))

    with pytest.raises(RuntimeError, match="entropies of 0 tokens for 8.*top_logprobs_server"):
        asyncio.run(generate(Stack(actors, Plain(model)).engine, [3], n_entropy=5))


def test_without_servers_a_group_fails_and_may_come_again(actors, model):
    stack = Stack(actors, TransformersEngine(model))
    ray.get(stack.balancer.reset.remote({}))

    async def group():
        asked = (generate(stack.engine, [3], request_id="group") for _ in range(3))
        errors = await asyncio.gather(*asked, return_exceptions=True)
        stack.engine.release("group")
        await stack.balancer.reset.remote(stack.servers)
        return errors, await generate(stack.engine, [3], request_id="group")

    errors, made = asyncio.run(group())
    assert ["No available servers" in str(error) for error in errors] == [True] * 3 and len(made.token_ids) == 8
    assert stack.counted() == ({"acquire": 1}, 1)


# the last one that needs the servers
def test_a_dead_server_is_the_failure_of_its_groups_only(actors, model):
    stack = Stack(actors, TransformersEngine(model))

    async def groups():
        await asyncio.gather(*(generate(stack.engine, [3], request_id=group) for group in "ab"))
        _, dead = await stack.engine.servers.acquired["a"]
        ray.kill(dead)
        with pytest.raises(ray.exceptions.RayActorError):
            await generate(stack.engine, [3], request_id="a")
        fine = await generate(stack.engine, [3], request_id="b")
        for group in "ab":
            stack.engine.release(group)
        return fine

    assert len(asyncio.run(groups()).token_ids) == 8
    assert stack.counted() == ({"acquire": 2, "release": 2}, 0)


def test_upstream_asks_its_servers_as_we_do():
    assert "await server.generate.remote(" in inspect.getsource(LLMServerClient.generate)
