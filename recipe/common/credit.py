"""Advantages from the values of a tree's nodes, of no paper. V, s: verl/trainer/ppo/credit/nodes.py.

tree_path   (V(node) - V(root)) / s, divided by the trajectories through the node: a shared token is trained once
tree_gain   (V(node) - V(root) + V(node) - V(parent)) / s, once: also rewards being better than the parent
"""

from verl.trainer.ppo.credit.nodes import gain, register_value_credit

compute_tree_path_advantage = register_value_credit(
    "tree_path", "(V(node) - V(root)) / s, a shared token once", lambda node, passing: node.value / passing
)
compute_tree_gain_advantage = register_value_credit(
    "tree_gain",
    "(V(node) - V(root) + V(node) - V(parent)) / s, a shared token once: what a node is worth, and by how much it is "
    "better than what it followed",
    lambda node, passing: gain(node) / passing,
)
