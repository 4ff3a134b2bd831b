"""New weights in a running vLLM CPU engine: its greedy tokens and log-probs equal those of `transformers`; and requests
with seeds give the same tokens however their prompts are cut into prefill steps.

One real engine (about 40 s): the weights go through the same `load_weights` that a weight sync ends in.
"""

import os
from pathlib import Path

import pytest

from tests.forked import as_in_a_run
from tests.fresh import output_of

pytestmark = pytest.mark.slow

CODE = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm import LLM, SamplingParams

folder = sys.argv[1]
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
texts = [f"<|im_start|>user\\n{i} 5 7 = 22<|im_end|>\\n<|im_start|>assistant\\n" for i in range(4)]
prompts = [tokenizer(text).input_ids for text in texts]

def compare(llm, label):
    sampling = SamplingParams(temperature=0, max_tokens=12, logprobs=0, ignore_eos=True)
    worst = 0.0
    for prompt, request in zip(prompts, llm.generate([{"prompt_token_ids": p} for p in prompts], sampling)):
        tokens = list(request.outputs[0].token_ids)
        sequence = torch.tensor([prompt + tokens])
        with torch.no_grad():
            logprobs = model(sequence).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        assert logprobs.argmax(-1).tolist() == tokens, (label, logprobs.argmax(-1).tolist(), tokens)
        theirs = torch.tensor([step[t].logprob for step, t in zip(request.outputs[0].logprobs, tokens)])
        worst = max(worst, (theirs - logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0]).abs().max().item())
    print("FOUND", label, worst)

def load(worker, file):
    worker.model_runner.model.load_weights(torch.load(file).items())
    import recipe.tasks.countdown.reward as overlay_in_a_vllm_worker
    return overlay_in_a_vllm_worker.__file__

if __name__ == "__main__":
    # 48 tokens a step: several prompts of 40 do not fit into one
    llm = LLM(folder, dtype="float32", enforce_eager=True, max_model_len=128, seed=0, max_num_batched_tokens=48,
              max_num_seqs=16, enable_prefix_caching=False)
    compare(llm, "loaded")
    seeded = [({"prompt_token_ids": (prompt * 3)[:40]}, SamplingParams(max_tokens=6, seed=i, ignore_eos=True))
              for i, prompt in enumerate(prompts)]
    alone = [llm.generate([p], s)[0].outputs[0].token_ids for p, s in seeded]
    together = [r.outputs[0].token_ids for r in llm.generate([p for p, _ in seeded], [s for _, s in seeded])]
    print("FOUND", "seeded", float(list(map(list, alone)) != list(map(list, together))))
    for update in range(2):
        torch.manual_seed(update)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
        weights = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
        torch.save(weights, f"{folder}/weights.pt")
        print("FOUND", *llm.collective_rpc(load, args=(f"{folder}/weights.pt",)))
        llm.reset_prefix_cache()
        compare(llm, f"update{update}")
"""


def test_greedy_tokens_and_logprobs_follow_the_weights(tmp_path):
    from recipe.common.tiny_model import write_tiny_model

    folder = write_tiny_model(tmp_path / "model")
    script = tmp_path / "compare.py"
    script.write_text(CODE)
    # insecure: for the function sent to the worker; test only
    env = as_in_a_run({**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"})
    output = output_of(["python", str(script), str(folder)], env)
    printed = [line.split()[1:] for line in output.splitlines() if line.startswith("FOUND")]
    differences = {label: float(value) for label, value in (f for f in printed if len(f) == 2)}
    assert set(differences) == {"loaded", "seeded", "update0", "update1"}
    assert all(value < 1e-4 for value in differences.values()), differences
    overlay_files = [Path(f[0]) for f in printed if len(f) == 1]
    assert len(overlay_files) == 2 and all(f.name == "reward.py" for f in overlay_files)
