"""Reasoning trees that are searched by value and uncertainty (HATO): the logic, without engine and trainer.

HATO has design notes and no paper; where the notes are silent the docstrings say what was decided.

    config.py   the keys under `hato`
    tree.py     nodes, merging, pruning, and the batch rows that a tree becomes
    search.py   which nodes are expanded next, with how many children (room.py: how many there is room for)
    rewards.py  R = alpha R_local + beta R_path + gamma R_causal of every node
    metrics.py  nodes, rewards, diversity, novelty
"""
