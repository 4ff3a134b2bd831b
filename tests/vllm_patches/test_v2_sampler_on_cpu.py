"""The sampler of vLLM's V2 runner, by both versions of vLLM, in Triton's interpreter.

It has HAPO's temperature, and gives what rollouts need: candidates with right log-probabilities, and tokens that a seed
and a position decide. It is the sampler of GPUs: of every model with vLLM 0.30, of some with 0.24, as
test_model_runner_on_cpu.py says. It runs in another process: vLLM behaves differently where it finds Triton.

The sampler reports the log-probabilities of the whole vocabulary, which are those of the tempered distribution. They
are compared with an oracle in plain Python and with the logits processor that does the same on the V1 runner.
"""

import json
import math
import os
import shutil
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.fresh import output_of, python_for, python_of
from tests.packages import GPU_VLLM, TRITON, unpacked

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
VOCABULARY = 9000  # three of the kernel's blocks, the last of which is not full
SETTINGS = {"temperature_tau": 0.5, "median": -0.5, "std": 0.8, "scale_pos": 0.9, "scale_neg": 0.4}
DICE = [2.0, 1.0, 0.5, 0.0, -1.0, -math.inf]
DRAWS = 400


def adaptive(temperature=1.0, **changes) -> dict:
    return {"temperature": temperature, "extra_args": {"adaptive_temperature": {**SETTINGS, **changes}}}


PLAIN, WARM = {"temperature": 1.0}, {"temperature": 0.7}
HOT, COOL = adaptive(0.8, temperature_tau=0.9, median=-3.0), {"temperature": 0.8}  # for DICE h is 1, and T' is 1.52
# row -> (the scale of its logits, its parameters, those of requests that have had its slot)
MIXED = {
    "uncertain": (0.1, adaptive(), []),
    "certain": (30.0, adaptive(), []),
    "in between": (2.0, adaptive(std=9.0), []),
    "warm": (2.0, adaptive(0.7, std=9.0), []),
    "in a slot of a plain request": (1.0, adaptive(), [PLAIN]),
    "in a slot of another": (2.0, adaptive(std=9.0), [adaptive(scale_neg=0.1)]),
    "plain": (2.0, PLAIN, []),
    "plain and warm": (2.0, WARM, []),
    "plain in a slot of an asking one": (2.0, PLAIN, [adaptive()]),
    "greedy": (2.0, adaptive(0.0), []),
    "tau 0": (2.0, adaptive(temperature_tau=0.0), []),
}


def rows(scales: list[float]) -> list[list[float]]:
    """Return random logits; tokens of the second block and some others are impossible."""
    logits = torch.randn(len(scales), VOCABULARY, generator=torch.Generator().manual_seed(3))
    logits = torch.tensor(scales).unsqueeze(-1) * logits
    logits[:, 4096:8192] = -torch.inf
    logits[:, ::7] = -torch.inf
    return logits.tolist()


def request_for(logits, params, slot, earlier=(), position=9, **more) -> dict:
    params = {**params, "seed": 40, **more}
    return {"logits": logits, "params": params, "slot": slot, "earlier": list(earlier), "position": position}


def batches() -> dict[str, list[dict]]:
    scales, params, earlier = zip(*MIXED.values(), strict=True)
    logits = rows(list(scales))
    n, whole = len(MIXED), {"logprobs": -1}
    mixed = [request_for(logits[i], params[i], n - 1 - i, earlier[i], **whole) for i in range(n)]
    return {
        "mixed": mixed,
        "alone": [{**mixed[0], "slot": 3}],
        "dice": [request_for(DICE, HOT, i, position=i) for i in range(DRAWS)],
        "cool dice": [request_for(DICE, COOL, i, position=i) for i in range(DRAWS)],
    }


def with_triton(version: str) -> dict[str, str]:
    path = [unpacked(TRITON), *([unpacked(GPU_VLLM, "*.py")] if version == GPU_VLLM else []), ROOT]
    others = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return {**others, "PYTHONPATH": os.pathsep.join(map(str, path))}


@pytest.fixture(scope="module", params=["installed", GPU_VLLM])
def sampled(request) -> dict[str, list[dict]]:
    """The sampler's answers to all batches, by batch; one process for each version of vLLM."""
    made = batches() | batches_of_draws()
    job = json.dumps({"mode": "processed_logprobs", "batches": list(made.values())})
    environment = {**with_triton(request.param), "TRITON_INTERPRET": "1"}
    output = output_of(python_of(ROOT / "tests/workers/rollout/v2_sampler.py"), environment, job)
    return dict(zip(made, json.loads(output.splitlines()[-1]), strict=True))


def reported(answer: dict) -> torch.Tensor:
    """Return the log-probability of each token; vLLM gives the sampled token's, then all in order of their size."""
    result = torch.full((VOCABULARY,), torch.nan, dtype=torch.float64)
    result[answer["token_ids"]] = torch.tensor(answer["logprobs"], dtype=torch.float64)
    return result


def tempered(logits: list[float], params: dict) -> list[float]:
    """Return log-probabilities at T (1 + tau h) in float64; greedy ones are of the raw distribution."""
    temperature = params["temperature"]
    settings = params.get("extra_args", {}).get("adaptive_temperature")
    if settings and temperature:
        plain = [math.exp(p) for p in softmax_logs(logits)]
        entropy = -sum(p * math.log(p) for p in plain if p > 0)
        z = (math.log(max(entropy, 1e-6)) - settings["median"]) / settings["std"]
        h = max(-1.0, min(1.0, z * settings["scale_pos" if z > 0 else "scale_neg"]))
        temperature *= 1 + settings["temperature_tau"] * h
    return softmax_logs([y / (temperature or 1.0) for y in logits])


def softmax_logs(logits: list[float]) -> list[float]:
    top = max(logits)
    total = math.fsum(math.exp(y - top) for y in logits)
    return [y - top - math.log(total) for y in logits]


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two rows of log-probabilities, which reach -100 here, agree as far as float32 allows."""
    return torch.allclose(a.double(), b.double(), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("row", MIXED)
def test_log_probabilities_are_those_of_the_tempered_distribution(sampled, row):
    i = list(MIXED).index(row)
    request, answer = batches()["mixed"][i], sampled["mixed"][i]
    assert close(reported(answer), torch.tensor(tempered(request["logits"], request["params"]), dtype=torch.float64))


def test_a_greedy_request_takes_the_most_likely_token(sampled):
    i = list(MIXED).index("greedy")
    logits = batches()["mixed"][i]["logits"]
    assert sampled["mixed"][i]["token"] == logits.index(max(logits))


def test_a_row_does_not_depend_on_the_batch(sampled):
    assert sampled["alone"][0] == sampled["mixed"][0]


def chi_square(tokens: list[int], probabilities: list[float]) -> float:
    return sum((tokens.count(i) - p * len(tokens)) ** 2 / (p * len(tokens)) for i, p in enumerate(probabilities) if p)


@pytest.mark.parametrize(("batch", "params", "other"), [("dice", HOT, COOL), ("cool dice", COOL, HOT)])
def test_sampled_frequencies_follow_the_adaptive_temperature(sampled, batch, params, other):
    """Chi-square with four degrees of freedom: p above 1e-3, and below 1e-6 for the other temperature."""
    tokens = [answer["token"] for answer in sampled[batch]]
    assert DICE.index(-math.inf) not in tokens
    assert chi_square(tokens, [math.exp(p) for p in tempered(DICE, params)]) < 18.47
    assert chi_square(tokens, [math.exp(p) for p in tempered(DICE, other)]) > 33.4


# ---- what rollouts need ----

SMALL = 2500  # three blocks of the kernels'
# what the requests of one batch ask for: (temperature, top_k, top_p, log-probabilities)
ASKED = [(1.0, -1, 1.0, 10), (0.7, -1, 1.0, 3), (0.0, -1, 1.0, 10), (1.0, 5, 1.0, 10), (1.3, -1, 0.6, 4)]
EVEN = [0.0] * SMALL
FLIPS, COIN = 128, [0.4, 0.6]


def drawn(logits, seed, position=9, slot=0, **params) -> dict:
    return request_for([float(value) for value in logits], params, slot, position=position, seed=seed)


@cache
def rows_asked() -> torch.Tensor:
    """A row for each of ASKED; tokens of no text, the last hundred, are impossible, as upstream's server has them."""
    rows = 3 * torch.randn(len(ASKED), SMALL, generator=torch.Generator().manual_seed(0))
    rows[:, -100:] = -torch.inf
    return rows


def batches_of_draws() -> dict[str, list[dict]]:
    asked = [
        drawn(row, 100 + i, slot=7 - i, temperature=temperature, top_k=k, top_p=p, logprobs=n)
        for i, (row, (temperature, k, p, n)) in enumerate(zip(rows_asked(), ASKED, strict=True))
    ]
    coin = torch.tensor(COIN).log()
    return {
        "top_logprobs": asked,
        "one of even chances": [drawn(EVEN, 5)],
        "among others": [*(drawn(EVEN, 30 + i, i, slot=i) for i in range(3)), drawn(EVEN, 5, slot=6)],
        "other seeds and positions": [drawn(EVEN, 6, slot=1), drawn(EVEN, 5, position=10, slot=2)],
        "over seeds": [drawn(coin, 1000 + i, slot=i) for i in range(FLIPS)],
        "over positions": [drawn(coin, 1000, position=i, slot=i) for i in range(FLIPS)],
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


def test_the_sampled_token_comes_first_then_the_most_likely_ones(sampled):
    for found, row, (*settings, n) in zip(sampled["top_logprobs"], rows_asked(), ASKED, strict=True):
        expected = distribution(row, *settings)
        assert found["token_ids"][0] == found["token"]
        likely = sorted(range(SMALL), key=lambda token: -expected[token])[:n]
        possible = [token for token in likely if expected[token] > -torch.inf]
        assert found["token_ids"][1:][: len(possible)] == possible
        assert len(found["token_ids"]) == n + 1
        assert found["logprobs"] == pytest.approx([expected[token] for token in found["token_ids"]], abs=1e-5)
        assert found["logprobs"][0] > -torch.inf


def test_seed_and_position_decide_the_token(sampled):
    """Among 2,500 equally likely ones; neither the batch nor the request's place in it matters."""
    (alone,) = sampled["one of even chances"]
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


# ---- without a GPU ----

COMPILE = """
import types, triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from vllm_patches.tempering_kernel import BLOCK, WARPS, _divide_row
# Triton finds its backends in its metadata, which are not unpacked
triton.backends.backends["nvidia"] = types.SimpleNamespace(compiler=CUDABackend)
constants = {"N_SETTINGS": 5, "FLOOR": 1e-6, "BLOCK": BLOCK}
signature = {"logits_ptr": "*fp32", "stride": "i32", "slots_ptr": "*i32", "temperatures_ptr": "*fp32"}
signature |= {"settings_ptr": "*fp32", "vocab_size": "i32", **dict.fromkeys(constants, "constexpr")}
source = triton.compiler.ASTSource(_divide_row, signature, constants)
kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": WARPS})
print(len(kernel.asm["cubin"]))
"""


def test_the_kernel_compiles_for_an_h100(tmp_path):
    """Triton's interpreter takes more of Python than its compiler does; no GPU is needed to compile."""
    assembler = Path(shutil.copy(unpacked(TRITON) / "triton/backends/nvidia/bin/ptxas", tmp_path))
    assembler.chmod(0o755)  # files of an unpacked wheel are not executable
    folders = {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_PTXAS_PATH": str(assembler)}
    assert int(output_of(python_for(COMPILE), with_triton("installed") | folders)) > 0
