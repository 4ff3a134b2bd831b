"""Registers what upstream's estimators compare a trajectory with; the menu offers `grpo` as a choice of `credit`.

`gae`, `reinforce_plus_plus` and `remax` compare with a critic, the batch or a greedy answer.
"""

from verl.utils.parts import Compares, describe_credit

describe_credit(
    "grpo",
    "GRPO (arXiv 2402.03300): each trajectory against the others of its prompt, (R - V(root)) / s for all its tokens",
    compares=Compares.GROUP,
)
for name in ("grpo_vectorized", "grpo_passk", "gpg", "opo", "rloo", "rloo_vectorized"):
    describe_credit(name, f"upstream's {name}", compares=Compares.GROUP, alias=True)
for name in ("reinforce_plus_plus_baseline", "gdpo", "optimal_token_baseline", "tir_optimal_token_baseline"):
    describe_credit(name, f"upstream's {name}", compares=Compares.GROUP_THEN_MORE, alias=True)
