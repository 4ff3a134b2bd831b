"""vLLM's V2 sampler gives what rollouts need: candidates with right log-probabilities, and tokens that a seed and a
position decide.

It is the sampler of GPUs: of every model with vLLM 0.30, of some with 0.24, as test_model_runner_on_cpu.py says. Its
Triton kernels run in Triton's interpreter, in another process: vLLM behaves differently where it finds Triton.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from vllm.logprobs import FlatLogprobs

from tests.fresh import python_of
from tests.packages import GPU_VLLM, TRITON, unpacked
from vllm_patches import cpu_version_name

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
VOCABULARY = 2500  # three blocks of the kernels'
# what the requests of one batch ask for: (temperature, top_k, top_p, log-probabilities)
ASKED = [(1.0, -1, 1.0, 10), (0.7, -1, 1.0, 3), (0.0, -1, 1.0, 10), (1.0, 5, 1.0, 10), (1.3, -1, 0.6, 4)]
EVEN = [0.0] * VOCABULARY
DRAWS, COIN = 128, [0.4, 0.6]


def request_for(logits, seed, position=9, slot=0, **params) -> dict:
    return {
        "logits": [float(value) for value in logits],
        "params": {"seed": seed, **params},
        "slot": slot,
        "position": position,
    }


@pytest.fixture(scope="module")
def logits() -> torch.Tensor:
    """A row for each of ASKED; tokens of no text, the last hundred, are impossible, as upstream's server has them."""
    rows = 3 * torch.randn(len(ASKED), VOCABULARY, generator=torch.Generator().manual_seed(0))
    rows[:, -100:] = -torch.inf
    return rows


@pytest.fixture(scope="module", params=["installed", GPU_VLLM])
def sampled(request, logits):
    """The answers to all batches below, by batch; one process for each version of vLLM."""
    path = [unpacked(TRITON), *([unpacked(GPU_VLLM, "*.py")] if request.param == GPU_VLLM else []), ROOT]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), "TRITON_INTERPRET": "1"}
    job = {"mode": "processed_logprobs", "batches": list(batches(logits).values())}
    done = subprocess.run(
        python_of(Path(__file__).with_name("v2_sampler.py")),
        input=json.dumps(job),
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(batches(logits), json.loads(done.stdout.splitlines()[-1]), strict=True))


def batches(logits: torch.Tensor) -> dict[str, list[dict]]:
    asked = [
        request_for(row, 100 + i, slot=7 - i, temperature=temperature, top_k=k, top_p=p, logprobs=n)
        for i, (row, (temperature, k, p, n)) in enumerate(zip(logits, ASKED, strict=True))
    ]
    coin = torch.tensor(COIN).log()
    return {
        "top_logprobs": asked,
        "alone": [request_for(EVEN, 5)],
        "among others": [*(request_for(EVEN, 30 + i, i, slot=i) for i in range(3)), request_for(EVEN, 5, slot=6)],
        "other seeds and positions": [request_for(EVEN, 6, slot=1), request_for(EVEN, 5, position=10, slot=2)],
        "over seeds": [request_for(coin, 1000 + i, slot=i) for i in range(DRAWS)],
        "over positions": [request_for(coin, 1000, position=i, slot=i) for i in range(DRAWS)],
    }


def distribution(row: torch.Tensor, temperature: float, top_k: int, top_p: float) -> list[float]:
    """Log-probabilities of what is sampled from; greedy: of the raw distribution."""
    row = row.double() / (temperature or 1.0)
    order = row.argsort(descending=True).tolist()
    probs = row.softmax(-1).tolist()
    kept = set(order[:top_k] if top_k > 0 else order)
    before = 0.0
    for token in order:
        kept -= {token} if before >= top_p else set()
        before += probs[token]
    return torch.tensor([x if i in kept else -torch.inf for i, x in enumerate(row.tolist())]).log_softmax(-1).tolist()


def test_the_sampled_token_comes_first_then_the_most_likely_ones(sampled, logits):
    for found, row, (*settings, n) in zip(sampled["top_logprobs"], logits, ASKED, strict=True):
        expected = distribution(row, *settings)
        assert found["token_ids"][0] == found["token"]
        likely = sorted(range(VOCABULARY), key=lambda token: -expected[token])[:n]
        possible = [token for token in likely if expected[token] > -torch.inf]
        assert found["token_ids"][1:][: len(possible)] == possible
        assert len(found["token_ids"]) == n + 1
        assert found["logprobs"] == pytest.approx([expected[token] for token in found["token_ids"]], abs=1e-5)
        assert found["logprobs"][0] > -torch.inf


def test_greedy_is_the_most_likely_token(sampled, logits):
    greedy = [temperature for temperature, *_ in ASKED].index(0.0)
    assert sampled["top_logprobs"][greedy]["token"] == int(logits[greedy].argmax())


def test_candidates_of_the_rollout_server(sampled, logits):
    """`ranked` on what this sampler reports: the most likely tokens, the likeliest first, each once."""
    cpu_version_name.install()
    from verl.workers.rollout.engines.top_logprobs_server import ranked

    for found, row, (*settings, n) in zip(sampled["top_logprobs"], logits, ASKED, strict=True):
        ends = [len(found["token_ids"])]
        flat = FlatLogprobs([0], ends, found["token_ids"], found["logprobs"], [None] * ends[0], [None] * ends[0])
        (top_logprobs,) = ranked(flat, n)
        expected = distribution(row, *settings)
        possible = [token for token in range(VOCABULARY) if expected[token] > -torch.inf]
        likely = sorted(possible, key=lambda token: -expected[token])[:n]
        assert [token for token, _ in top_logprobs][: len(likely)] == likely
        assert [p for _, p in top_logprobs][: len(likely)] == pytest.approx([expected[t] for t in likely], abs=1e-5)


def test_seed_and_position_decide_the_token(sampled):
    """Among 2,500 equally likely ones; neither the batch nor the request's place in it matters."""
    (alone,) = sampled["alone"]
    assert sampled["among others"][-1]["token"] == alone["token"]
    others = {found["token"] for found in (*sampled["among others"][:-1], *sampled["other seeds and positions"])}
    assert len(others) == 5 and alone["token"] not in others


@pytest.mark.parametrize("over", ["over seeds", "over positions"])
def test_neighboring_seeds_and_positions_draw_independently(sampled, over):
    """Pairs of consecutive draws of a biased coin, chi-square against its probabilities' products: p above 1e-3."""
    tokens = [found["token"] for found in sampled[over]]
    pairs = list(zip(tokens[::2], tokens[1::2], strict=True))
    expected = {(a, b): COIN[a] * COIN[b] * len(pairs) for a in (0, 1) for b in (0, 1)}
    statistic = sum((pairs.count(pair) - count) ** 2 / count for pair, count in expected.items())
    assert statistic < 16.27  # three degrees of freedom
