"""Scores continuations on vLLM's V2 model runner, on the CPU: Triton's interpreter runs the runner's kernels.

    TRITON_INTERPRET=1 PYTHONPATH=<triton>:<repository> python v2_scores.py MODEL BLOCK < cases.json

MODEL is a model's folder, BLOCK the number of tokens in a block of the prefix cache. Standard input: a list of [prompt
token ids, continuation token ids], which are scored one after another. Standard output's last line: for each case
{"scores": the log-probabilities, "requests": for each of its requests [cached tokens, reported log-probabilities]}.
"""

import asyncio
import json
import os
import sys
from types import SimpleNamespace

import triton.backends

from vllm_patches import cpu_version_name

# vLLM's engine process imports this file too, and takes Triton for unusable without these two lines.
cpu_version_name.install()
triton.backends.backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: False))

from verl.workers.rollout.engines.local_vllm import VLLMEngine  # noqa: E402


def main() -> None:
    model, block = sys.argv[1:]
    os.environ |= {"VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    options = {"enforce_eager": True, "distributed_executor_backend": "uni", "gpu_memory_utilization": 0.1, "seed": 0}
    engine = VLLMEngine.start(model, 300, dtype="float32", block_size=int(block), max_model_len=512, **options)
    try:
        assert engine.engine.vllm_config.use_v2_model_runner
        answers = asyncio.run(answers_to(engine, json.load(sys.stdin)))
    finally:
        engine.shutdown()
    print(json.dumps(answers))


async def answers_to(engine: VLLMEngine, cases: list) -> list[dict]:
    requests = []
    only_output = engine._only_output

    async def recorded(*args):
        output = await only_output(*args)
        requests.append([output.num_cached_tokens, sum(bool(token) for token in output.prompt_logprobs)])
        return output

    engine._only_output = recorded
    answers = []
    for prompt, continuation in cases:
        scores = await engine.score(prompt, continuation)
        answers.append({"scores": scores, "requests": requests[:]})
        requests.clear()
    return answers


if __name__ == "__main__":
    main()
