"""TreeRL's credit (arXiv 2506.11902), `credit=treerl`.

    (V(node) - V(root) + V(node) - V(parent)) / sqrt(trajectories through the node)

V: verl/trainer/ppo/credit/nodes.py.
"""

from verl.trainer.ppo.credit.nodes import gain, register_value_credit

compute_treerl_advantage = register_value_credit(
    "treerl",
    "TreeRL (arXiv 2506.11902): (V(node) - V(root) + V(node) - V(parent)) / sqrt(trajectories through the node)",
    lambda node, passing: gain(node) / passing.sqrt(),
    divides_by_std=False,
)
