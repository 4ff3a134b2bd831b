"""ARPO's hard credit (arXiv 2507.19849), `credit=arpo_hard`: (V(node) - V(root)) / s at each token of a node.

ARPO's default is its soft credit, plain GRPO. V, s: verl/trainer/ppo/credit/nodes.py.
"""

from verl.trainer.ppo.credit.nodes import register_value_credit

compute_arpo_hard_advantage = register_value_credit(
    "arpo_hard",
    "ARPO's hard credit (arXiv 2507.19849): a shared token has the mean advantage of the trajectories through it, "
    "(V(node) - V(root)) / s, in each of them",
    lambda node, passing: node.value,
)
