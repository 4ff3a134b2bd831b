"""The lookahead tree reads the same candidates and entropies from a real vLLM engine as from `transformers` (float32).

One engine (about 40 s) in a process of its own.
"""

import json
import os
import subprocess

import pytest

from tests.forked import as_in_a_run

pytestmark = pytest.mark.slow

TOLERANCE = 1e-4
CODE = """
import asyncio, json, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm import LLM, SamplingParams
from vllm_patches import cpu_version_name
cpu_version_name.install()
from verl.workers.rollout.engines.top_logprobs_server import ranked, top_log_probs
from verl.utils.entropy_estimate import entropies_of
from verl.workers.rollout.engines.interface import GenerationRequest
from verl.workers.rollout.engines.local_transformers import TransformersEngine

if __name__ == "__main__":
    folder = sys.argv[1]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    llm = LLM(folder, dtype="float32", enforce_eager=True, max_model_len=128, seed=0, gpu_memory_utilization=0.3,
              logprobs_mode="processed_logprobs")
    sampling = SamplingParams(temperature=0, max_tokens=30, logprobs=10, flat_logprobs=True)
    output = llm.generate([{"prompt_token_ids": [5, 6, 7]}], sampling)[0].outputs[0]
    tokens, ours = list(output.token_ids), ranked(output.logprobs, 3)
    entropies = entropies_of(top_log_probs(output.logprobs, 10), len(tokenizer)).tolist()
    engine, errors = TransformersEngine(model, tokenizer), []
    for i, (candidates, entropy) in enumerate(zip(ours, entropies, strict=True)):
        # after vLLM's own tokens: a near-tie does no harm
        theirs = asyncio.run(engine.generate(GenerationRequest(
            [5, 6, 7, *tokens[:i]], max_tokens=1, stop_token_ids=[], temperature=0, n_top_logprobs=10, n_entropy=10)))
        log_probs = dict(theirs.top_logprobs[0])
        errors.append(max(abs(log_prob - log_probs[token]) for token, log_prob in candidates))
        errors.append(max(abs(a - b) for (_, a), b in zip(candidates, log_probs.values())))
        errors.append(abs(entropy - theirs.entropies[0]))
    print("FOUND", json.dumps([[len(candidates) for candidates in ours], max(errors), max(entropies)]))
"""


def test_candidates_and_entropies_on_vllm_are_those_on_transformers(tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    from recipe.common.tiny_model import write_tiny_model

    folder = write_tiny_model(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        model.model.norm.weight.mul_(10)  # an untrained model is nearly uniform
    model.save_pretrained(folder)
    script = tmp_path / "compare.py"
    script.write_text(CODE)
    env = as_in_a_run({**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"})
    done = subprocess.run(["python", str(script), str(folder)], capture_output=True, text=True, env=env, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    (printed,) = [line.removeprefix("FOUND ") for line in done.stdout.splitlines() if line.startswith("FOUND")]
    counts, error, largest = json.loads(printed)
    assert counts == [3] * 30 and error < TOLERANCE and largest > 0.1, "nats, of the same tokens"
