"""LATR: lookahead-tree rollouts (arXiv 2510.24302), `tree=latr`. The decoder can be used alone:

from transformers import AutoModelForCausalLM, AutoTokenizer
from verl.workers.rollout.trees.latr import KTConfig, latr_generate

tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-3B")
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-3B", dtype="bfloat16", device_map="cuda")
prompts = [tokenizer("Use 3, 6 and 4 to make 7: ").input_ids]
(tree,) = latr_generate(model, tokenizer, prompts, KTConfig(), n=8)
for tokens in tree.trajectories():
    print(tokenizer.decode(tokens))
print(tree.metrics)
"""

from verl.workers.rollout.trees.latr.config import KTConfig
from verl.workers.rollout.trees.latr.decoder import latr_generate
from verl.workers.rollout.trees.latr.policy import Policy

__all__ = ["KTConfig", "Policy", "latr_generate"]
