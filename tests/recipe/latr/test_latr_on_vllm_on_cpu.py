"""The lookahead tree on a real vLLM engine is the one on `transformers`, in float32, and so are entropies.

One engine (about 40 s) in a process of its own. Where the trees differ, the first difference must be a near-tie: a
decision (first candidate, or a threshold) whose margin is below TOLERANCE. How many there were is printed.
"""

import json
import os
import subprocess

import pytest

from tests.forked import as_in_a_run

pytestmark = pytest.mark.slow

TOLERANCE = 1e-4
CODE = """
import asyncio, json, math, random, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm import LLM, SamplingParams
from vllm_patches import cpu_version_name
cpu_version_name.install()
from verl.workers.rollout.engines.top_logprobs_server import ranked, top_log_probs
from verl.utils.entropy_estimate import entropies_of
from verl.workers.rollout.tree_builder import TreeBuilder
from verl.workers.rollout.engines.interface import Generation, GenerationRequest
from verl.workers.rollout.engines.local_transformers import TransformersEngine
from recipe.latr.keys import KTConfig
from recipe.latr.lookahead import LookaheadTree
from recipe.latr.tree import TreeGrower

folder, TOLERANCE = sys.argv[1], float(sys.argv[2])

class OfflineEngine:
    def __init__(self, llm):
        self.llm = llm

    async def generate(self, request):
        n, n_entropy = max(request.n_top_logprobs, request.n_entropy), request.n_entropy
        sampling = SamplingParams(temperature=0, max_tokens=request.max_tokens, logprobs=n, flat_logprobs=True,
                                  stop_token_ids=request.stop_token_ids)
        (made,) = self.llm.generate([{"prompt_token_ids": list(request.prompt_ids)}], sampling, use_tqdm=False)
        output = made.outputs[0]
        tokens = list(output.token_ids)
        flat = output.logprobs
        chosen = [flat.logprobs[at] for at in flat.start_indices]
        entropies = entropies_of(top_log_probs(flat, n)[:, :n_entropy], len(tokenizer)).tolist() if n_entropy else None
        stopped = tokens[-1] in request.stop_token_ids
        return Generation(tokens, chosen, ranked(flat, request.n_top_logprobs), stopped, entropies=entropies)

class Watched(LookaheadTree):
    # the smallest margin of any decision of each step
    def advance(self, choices):
        margins = []
        for choice in choices:
            if choice is not None:
                p = [math.exp(log_prob) for _, log_prob in choice.top_logprobs]
                margins.append(p[0] - p[1])
                margins += [abs(x - self.config.prob_filter_abs_thres) for x in p[1:]]
                margins += [abs(p[0] - x - self.config.prob_filter_rel_thres) for x in p[1:]]
        self.margins.append(min(margins, default=1.0))
        super().advance(choices)
        self.states.append(sorted((row.number, tuple(row.tokens)) for row in self.rows))

def grow(engine, prompt, config):
    tree = Watched(6, config, 30, [tokenizer.eos_token_id], lambda token: tokenizer.decode([token]))
    tree.margins, tree.states = [], []
    growth = TreeBuilder(engine, prompt, max_tokens=30, stop_token_ids=[tokenizer.eos_token_id])
    asyncio.run(TreeGrower(growth, tree, seed=0).grow())
    return tree

if __name__ == "__main__":
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    llm = LLM(folder, dtype="float32", enforce_eager=True, max_model_len=128, seed=0, gpu_memory_utilization=0.3,
              logprobs_mode="processed_logprobs")
    generator, same, ties, births = random.Random(0), 0, 0, 0
    for i in range(12):
        prompt = [generator.randrange(200) for _ in range(generator.randint(2, 12))]
        config = KTConfig(max_n_branch_per_token=generator.choice([2, 3]), chunk_size=generator.choice([1, 7, 64]),
                          prob_filter_abs_thres=0.05, prob_filter_rel_thres=0.5, rollout_filter_steps=[4, 9],
                          keep_math_symbols=False, return_on_full=False, force_return_step=-1)
        ours, theirs = grow(OfflineEngine(llm), prompt, config), grow(TransformersEngine(model), prompt, config)
        births += len(theirs.record.births)
        if ours.states == theirs.states:
            same += 1
            continue
        first = next(t for t, (a, b) in enumerate(zip(ours.states, theirs.states)) if a != b)
        assert theirs.margins[first] < TOLERANCE, (i, first, theirs.margins[first])
        ties += 1
    options = dict(stop_token_ids=[], temperature=0, n_top_logprobs=2, n_entropy=10)
    ours = asyncio.run(OfflineEngine(llm).generate(GenerationRequest([5, 6, 7], max_tokens=30, **options)))
    errors, largest = [], max(ours.entropies)
    for i, entropy in enumerate(ours.entropies):  # after vLLM's own tokens: a near-tie does no harm
        request = GenerationRequest([5, 6, 7, *ours.token_ids[:i]], max_tokens=1, **options)
        theirs = asyncio.run(TransformersEngine(model, tokenizer).generate(request))
        errors.append(abs(entropy - theirs.entropies[0]))
    print("FOUND", json.dumps([same, ties, births, len(errors), max(errors), largest]))
"""


def test_the_tree_on_vllm_is_the_tree_on_transformers(tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    from recipe.common.tiny_model import write_tiny_model

    folder = write_tiny_model(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        model.model.norm.weight.mul_(10)  # an untrained model is nearly uniform and would never branch
    model.save_pretrained(folder)
    script = tmp_path / "grow.py"
    script.write_text(CODE)
    env = as_in_a_run({**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"})
    command = ["python", str(script), str(folder), str(TOLERANCE)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    (found,) = [line.removeprefix("FOUND ") for line in done.stdout.splitlines() if line.startswith("FOUND")]
    same, ties, births, tokens, error, largest = json.loads(found)
    print(f"{same} trees equal, {ties} differ at a near-tie, {births} births; entropies differ by at most {error}")
    assert same >= 10 and births > 20
    assert tokens == 30 and error < TOLERANCE and largest > 0.1, "nats, of the same tokens"
