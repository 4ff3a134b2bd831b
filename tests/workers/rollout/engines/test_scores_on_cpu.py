"""Log-probabilities of given continuations: of `transformers`, of a real vLLM that has the prefix in its cache (with
both of its model runners), of a server."""

import asyncio
import json
import os
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.fresh import output_of
from tests.packages import TRITON, unpacked
from verl.workers.rollout.engines import local_vllm
from verl.workers.rollout.engines.interface import GenerationRequest, last_scores
from verl.workers.rollout.engines.local_transformers import TransformersEngine
from verl.workers.rollout.engines.local_vllm import VLLMEngine
from verl.workers.rollout.engines.vllm_server import LLMClientEngine
from verl.workers.rollout.tree_rollout import GroupEngine
from vllm_patches import cpu_version_name

BLOCK = 32
MOST_ROWS = 64
ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture(scope="module")
def model(model_folder):
    return AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()


class RecordedLogits:
    """An extension of vLLM's worker (`worker_extension_cls`) that counts the rows of which it computes logits."""

    def record_logits(self) -> None:
        self.rows = []
        model = self.model_runner.model
        compute_logits = model.compute_logits

        def recorded(hidden_states, *args, **kwargs):
            self.rows.append(len(hidden_states))
            return compute_logits(hidden_states, *args, **kwargs)

        model.compute_logits = recorded

    def recorded_rows(self) -> list[int]:
        return self.rows


def expected(model, prompt, continuation) -> list[float]:
    """The log-probabilities one token at a time."""
    tokens, actual = list(prompt), []
    for token in continuation:
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0, -1].double()
        actual.append(float(logits[token] - logits.logsumexp(-1)))
        tokens.append(token)
    return actual


def cases(n: int) -> list[tuple[list[int], list[int]]]:
    """Beginnings that grow, with short continuations."""
    draw = random.Random(0)
    path = [draw.randrange(5, 200) for _ in range(150)]
    continuations = [[draw.randrange(5, 200) for _ in range(draw.randrange(1, 6))] for _ in range(n)]
    return [(path[: draw.randrange(1, len(path))], continuation) for continuation in continuations]


def test_the_last_tokens_of_a_report_are_the_continuations():
    assert last_scores([-1.0, -2.0, -3.0], 0, 2, 2) == [-2.0, -3.0]
    assert last_scores([9.9, 9.9, -3.0], 2, 3, 1) == [-3.0], "the older runner fills up what the cache had"
    assert last_scores([-3.0], 2, 3, 1) == [-3.0], "the V2 runner leaves it out"
    assert last_scores([9.9, -3.0], 3, 3, 2) is None, "the cache had a token of the continuation"
    assert last_scores([], None, 3, 2) is None, "aborted"


def test_transformers_scores_are_the_models(model):
    engine = GroupEngine(TransformersEngine(model))
    for prompt, continuation in cases(5):
        actual = asyncio.run(engine.score(prompt, continuation))
        assert actual == pytest.approx(expected(model, prompt, continuation), abs=1e-4)
    assert asyncio.run(engine.score([5], [])) == []


def test_vllms_scores_are_the_models_whatever_its_cache_holds(model_folder, model, monkeypatch):
    cpu_version_name.install()  # upstream's server module asks for vLLM's version
    for name, value in {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(local_vllm, "MAX_SCORED_TOKENS", MOST_ROWS)
    options = {"enforce_eager": True, "distributed_executor_backend": "uni", "gpu_memory_utilization": 0.1, "seed": 0}
    options["worker_extension_cls"] = f"{RecordedLogits.__module__}.RecordedLogits"
    engine = VLLMEngine.start(model_folder, 300, dtype="float32", block_size=BLOCK, max_model_len=512, **options)
    try:
        asyncio.run(scores_are_the_models(engine, model))
    finally:
        engine.shutdown()


async def scores_are_the_models(engine: VLLMEngine, model) -> None:
    await engine.engine.collective_rpc("record_logits")
    prompt = list(range(10, 110))
    await engine.generate(GenerationRequest(prompt, max_tokens=8, stop_token_ids=[]))  # three blocks are cached
    cached = []
    real = engine._only_output

    async def seen(*args):
        output = await real(*args)
        cached.append(output.num_cached_tokens)
        return output

    engine._only_output = seen
    actual = await asyncio.gather(*(engine.score(*case) for case in cases(8)), engine.score(prompt, [7, 8, 9]))
    for case, scores in zip([*cases(8), (prompt, [7, 8, 9])], actual, strict=True):
        assert scores == pytest.approx(expected(model, *case), abs=1e-4)
    assert max(cached) == 3 * BLOCK, "nothing was taken from the cache"
    # a continuation of two blocks, the second time from the cache: computed once more
    long = list(range(60, 130))
    for _ in range(2):
        assert await engine.score(prompt, long) == pytest.approx(expected(model, prompt, long), abs=1e-4)
    assert cached[-2:] == [5 * BLOCK, 0]
    (rows,) = await engine.engine.collective_rpc("recorded_rows")
    assert max(rows) == MOST_ROWS, "170 tokens are scored in parts"


@pytest.mark.slow
def test_the_v2_runners_scores_are_the_models_whatever_its_cache_holds(model_folder, model):
    """The engine runs in another process, because vLLM behaves differently where it finds Triton."""
    prompt, long = list(range(10, 110)), list(range(60, 130))
    scored = [(prompt, [7, 8, 9]), (prompt, [9, 8, 7]), *cases(8), (prompt, long), (prompt, long)]
    command = [sys.executable, str(Path(__file__).with_name("v2_scores.py")), model_folder, str(BLOCK)]
    environment = {**os.environ, "PYTHONPATH": f"{unpacked(TRITON)}:{ROOT}", "TRITON_INTERPRET": "1"}
    answers = json.loads(output_of(command, environment, json.dumps(scored)).splitlines()[-1])
    for case, answer in zip(scored, answers, strict=True):
        assert answer["scores"] == pytest.approx(expected(model, *case), abs=1e-4)
    requests = [answer["requests"] for answer in answers]
    # the runner reports a number for each token after the first that it has computed, and none for the cached ones
    assert requests[0] == [[0, 102]] and requests[1] == [[3 * BLOCK, 102 - 3 * BLOCK]]
    # the second time the cache holds two blocks of the continuation, so that it is computed once more
    assert requests[-1] == [[5 * BLOCK, 169 - 5 * BLOCK], [0, 169]]


def test_a_server_is_asked_again_after_an_abort_and_without_its_cache_where_that_holds_the_continuation(monkeypatch):
    monkeypatch.setattr("verl.workers.rollout.engines.vllm_server.REJECTED_SECONDS", 0)
    aborted = SimpleNamespace(token_ids=[], stop_reason="aborted", extra_fields={})
    reports = [[0.0], [9.9], [-1.0], [-2.0], [0.0]]  # upstream ends them with a number that means nothing
    from_cache = {"prompt_logprobs": reports, "num_cached_tokens": 4}
    whole = {"prompt_logprobs": [[-0.1], [-0.2], [-1.5], [-2.5], [0.0]], "num_cached_tokens": 0}
    completed = [SimpleNamespace(token_ids=[1], stop_reason="completed", extra_fields=x) for x in (from_cache, whole)]
    answers, asked = [aborted, *completed], []

    async def generate(group, tokens, params):
        asked.append((group, tokens, params["skip_reading_prefix_cache"]))
        return answers[len(asked) - 1]

    engine = LLMClientEngine(client=None, text_of=str)
    monkeypatch.setattr(engine.servers, "send", generate)
    assert asyncio.run(engine.score([1, 2, 3], [4, 5], request_id="group")) == [-1.5, -2.5]
    assert asked == [("group", [1, 2, 3, 4, 5], False)] * 2 + [("group", [1, 2, 3, 4, 5], True)]
