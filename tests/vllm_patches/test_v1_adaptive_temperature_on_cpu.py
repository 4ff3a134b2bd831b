"""HAPO's adaptive temperature: formula, bookkeeping in a changing batch, frequencies on a real engine."""

import json
import math
import os
import random

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality, validate_logits_processors_parameters

from tests.forked import as_in_a_run
from tests.fresh import output_of
from vllm_patches.tempered_requests import PROCESSOR
from vllm_patches.v1_adaptive_temperature import AdaptiveTemperature, compute_entropy_based_temperature, read_settings

SETTINGS = {"temperature_tau": 0.5, "median": -0.5, "std": 0.8, "scale_pos": 0.9, "scale_neg": 0.4}


def sampling(**changes) -> SamplingParams:
    temperature = changes.pop("temperature", 0.8)
    return SamplingParams(temperature=temperature, extra_args={"adaptive_temperature": {**SETTINGS, **changes}})


def slow_factor(logits: list[float], temperature_tau, median, std, scale_pos, scale_neg) -> float:
    """T'/T of one row in plain Python."""
    top = max(logits)
    weights = [math.exp(value - top) for value in logits]
    probabilities = [weight / sum(weights) for weight in weights]
    entropy = -sum(p * math.log(p) for p in probabilities if p > 0)
    z = (math.log(max(entropy, 1e-6)) - median) / std
    return 1 + temperature_tau * max(-1.0, min(1.0, z * (scale_pos if z > 0 else scale_neg)))


@pytest.mark.parametrize("spread", [0.0, 0.1, 1.0, 5.0, 100.0])
def test_the_formula_row_by_row(spread):
    logits = spread * torch.randn(5, 40, generator=torch.Generator().manual_seed(1))
    logits[0, 3:] = -math.inf
    factors = compute_entropy_based_temperature(logits, **SETTINGS)
    expected = [slow_factor(row.tolist(), **SETTINGS) for row in logits]
    assert factors.tolist() == pytest.approx(expected, rel=1e-4)


def new_processor() -> AdaptiveTemperature:
    return AdaptiveTemperature(None, torch.device("cpu"), False)


def test_rows_that_do_not_ask_are_bit_identical():
    processor = new_processor()
    ordinary = SamplingParams(temperature=0.8)
    rows = [ordinary, sampling(), sampling(temperature=0), sampling(temperature_tau=0.0), sampling(), ordinary]
    processor.update_state(BatchUpdate(6, [], [(i, params, [1], []) for i, params in enumerate(rows)], []))
    logits = torch.randn(6, 50)
    assert new_processor().apply(logits) is logits, "without requests the very tensor comes back"
    changed = processor.apply(logits.clone())
    same = [torch.equal(a, b) for a, b in zip(changed, logits, strict=True)]
    assert same == [True, False, True, True, False, True]
    for row in (1, 4):
        torch.testing.assert_close(changed[row], logits[row] / slow_factor(logits[row].tolist(), **SETTINGS))


@pytest.mark.parametrize("seed", range(20))
def test_requests_keep_their_settings_while_the_batch_changes(seed):
    """Random arrivals, departures, moves and swaps against a plain list of who sits where."""
    generator = random.Random(seed)
    processor, seats, number = new_processor(), {}, 0
    for _ in range(60):
        removed, added, moved = [], [], []
        kind = generator.choice(["add", "remove", "replace", "move", "swap"])
        free = next(i for i in range(100) if i not in seats)
        if kind == "add" or not seats:
            number += 1
            seats[free] = sampling(temperature_tau=number / 1000) if generator.random() < 0.6 else SamplingParams()
            added = [(free, seats[free], [1], [])]
        elif kind == "remove":
            seat = generator.choice(sorted(seats))
            del seats[seat]
            removed = [seat]
        elif kind == "replace":
            seat, number = generator.choice(sorted(seats)), number + 1
            seats[seat] = sampling(temperature_tau=number / 1000)
            added = [(seat, seats[seat], [1], [])]
        elif kind == "move":
            seat = generator.choice(sorted(seats))
            seats[free] = seats.pop(seat)
            moved = [(seat, free, MoveDirectionality.UNIDIRECTIONAL)]
        elif len(seats) > 1:
            a, b = generator.sample(sorted(seats), 2)
            seats[a], seats[b] = seats[b], seats[a]
            moved = [(a, b, MoveDirectionality.SWAP)]
        processor.update_state(BatchUpdate(len(seats), removed, added, moved))
        expected = {seat: read_settings(params) for seat, params in seats.items() if read_settings(params)}
        assert processor.requests == expected
        assert processor.rows.tolist() == sorted(expected)
        taus = [expected[seat][0] for seat in sorted(expected)]
        assert processor.settings[0].tolist() == pytest.approx(taus)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"temperature_tau": 0.1}, "exactly temperature_tau, median"),
        ({**SETTINGS, "tau": 1}, "exactly"),
        ({**SETTINGS, "temperature_tau": 1.0}, "temperature_tau in"),
        ({**SETTINGS, "std": 0.0}, "above 0"),
        ({**SETTINGS, "median": math.nan}, "a finite median"),
        ({**SETTINGS, "scale_neg": math.nan}, "above 0"),
        ("0.05", "exactly"),
    ],
)
def test_bad_settings_are_refused_with_the_request(settings, named):
    params = SamplingParams(extra_args={"adaptive_temperature": settings})
    with pytest.raises(Exception, match=named):  # a ValueError, and with vLLM 0.30 an error of its own
        validate_logits_processors_parameters([PROCESSOR], params)


ENGINE = """
import collections, json, sys
from vllm import LLM, SamplingParams

folder, settings = sys.argv[1], json.loads(sys.argv[2])
if __name__ == "__main__":
    processors = ["vllm_patches.v1_adaptive_temperature:AdaptiveTemperature"]
    llm = LLM(folder, dtype="float32", enforce_eager=True, max_model_len=64, seed=0, max_num_seqs=256,
              gpu_memory_utilization=0.3, logits_processors=processors)
    prompts = [{"prompt_token_ids": list(range(40 + 9 * i, 46 + 9 * i))} for i in range(2)]
    tempered = {"adaptive_temperature": settings}
    off = {"adaptive_temperature": {**settings, "temperature_tau": 0}}
    kinds = {"tempered": tempered, "ordinary": None, "off": off}
    requests = [(kind, i) for kind in kinds for i in range(2)]
    sampling = [SamplingParams(n=3000, temperature=0.8, max_tokens=1, seed=7, logprobs=0, extra_args=kinds[kind])
                for kind, _ in requests]
    outputs = llm.generate([prompts[i] for _, i in requests], sampling)
    # The greedy request comes alone: vLLM 0.24's CPU sampler ignores all seeds of a batch that has a row without one.
    requests.append(("greedy", 0))
    outputs += llm.generate(prompts[:1], SamplingParams(temperature=0, max_tokens=1, extra_args=tempered))
    tokens = [[sample.token_ids[0] for sample in request.outputs] for request in outputs]
    with open(sys.argv[3], "w") as file:  # the engine's process may write to stdout within a line of this one
        json.dump([[kind, i, drawn] for (kind, i), drawn in zip(requests, tokens)], file)
"""


@pytest.fixture(scope="module")
def engine_samples(tmp_path_factory):
    """(next-token logits by `transformers`, sampled tokens by kind and prompt); one real engine, about 40 s."""
    from transformers import AutoModelForCausalLM

    from recipe.common.tiny_model import write_tiny_model

    folder = write_tiny_model(tmp_path_factory.mktemp("adaptive") / "model")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        model.model.norm.weight.mul_(12)  # an untrained model is nearly uniform, at any temperature
    model.save_pretrained(folder)
    script = folder / "engine.py"
    script.write_text(ENGINE)
    env = as_in_a_run({**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"})
    output_of(["python", str(script), str(folder), json.dumps(SETTINGS), str(folder / "samples.json")], env)
    with torch.no_grad():
        logits = [model(torch.tensor([list(range(40 + 9 * i, 46 + 9 * i))])).logits[0, -1] for i in range(2)]
    samples = json.loads((folder / "samples.json").read_text())
    return logits, {(kind, i): tokens for kind, i, tokens in samples}


def chi_square_p(tokens: list[int], probabilities: torch.Tensor) -> float:
    """p-value of the observed counts; tokens expected fewer than 5 times share one bin."""
    observed = torch.bincount(torch.tensor(tokens), minlength=len(probabilities)).double()
    expected = probabilities.double() * len(tokens)
    frequent = expected >= 5
    observed = torch.cat([observed[frequent], observed[~frequent].sum().view(1)])
    expected = torch.cat([expected[frequent], expected[~frequent].sum().view(1)])
    statistic = ((observed - expected).square() / expected).sum()
    return torch.special.gammaincc(torch.tensor((len(observed) - 1) / 2).double(), statistic / 2).item()


@pytest.mark.slow
@pytest.mark.parametrize("prompt", [0, 1])
def test_sampled_frequencies_follow_the_adaptive_temperature(engine_samples, prompt):
    logits, samples = engine_samples[0][prompt], engine_samples[1]
    factor = slow_factor(logits.tolist(), **SETTINGS)
    assert abs(factor - 1) > 0.1
    tempered, ordinary = (logits / (0.8 * factor)).softmax(-1), (logits / 0.8).softmax(-1)
    assert chi_square_p(samples["tempered", prompt], tempered) > 1e-3
    assert chi_square_p(samples["ordinary", prompt], ordinary) > 1e-3
    # the test can tell the two apart
    assert chi_square_p(samples["tempered", prompt], ordinary) < 1e-6
    assert chi_square_p(samples["ordinary", prompt], tempered) < 1e-6


def test_tau_zero_and_greedy_requests_are_ordinary(engine_samples):
    logits, samples = engine_samples
    for prompt in (0, 1):
        assert samples["off", prompt] == samples["ordinary", prompt]
    assert samples["greedy", 0] == [logits[0].argmax().item()]
