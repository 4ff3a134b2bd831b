"""Trees for tests: from nested lists, and random ones."""

import random

from verl.workers.rollout.trees.hato.tree import LEAF, ROOT, ReasoningTree


def grown(shape: list, tree: ReasoningTree | None = None, parent: int = ROOT) -> ReasoningTree:
    """A tree of nested lists; a number in place of a list is a leaf with that outcome. Numbered depth first.

    grown([[1.0, 0.0], 0.0]): node 1 has the leaves 2 (right) and 3 (wrong), node 4 is a leaf after the problem.
    """
    tree = tree if tree is not None else ReasoningTree([100, 101])
    for child in shape:
        number, is_leaf = len(tree.nodes), not isinstance(child, list)
        tree.add(parent, [number, 1000 + number], [-0.5, -float(number)], ended=is_leaf)
        if is_leaf:
            tree.nodes[number].outcome = child
        else:
            grown(child, tree, number)
    return tree


def random_tree(seed: int, size: int = 40, pruned: int = 4) -> ReasoningTree:
    """Random shape, outcomes, counts and local rewards; a few subtrees pruned, a few leaves not verified."""
    rng = random.Random(seed)
    tree = ReasoningTree([7, 8, 9])
    for _ in range(size):
        parents = [i for i, node in enumerate(tree.nodes) if node.status != LEAF and node.depth < 5]
        parent = rng.choice(parents)
        # few different tokens: identical siblings are frequent
        tokens = [rng.randrange(4) for _ in range(rng.randrange(1, 3))]
        number = tree.add(parent, tokens, [-rng.random() for _ in tokens], ended=False)
        tree.nodes[number].local_reward = rng.random()
        if rng.random() < 0.3 and not tree.nodes[number].children:
            tree.nodes[number].status = LEAF
    for number, node in enumerate(tree.nodes):
        if not node.children and number != ROOT:
            node.status = LEAF
        if node.status == LEAF:
            node.outcome = rng.choice([None, 0.0, 0.1, 1.0, 1.0])
    for _ in range(pruned):
        kept = [i for i in range(1, len(tree.nodes)) if tree.is_kept(i)]
        if len(tree.kept_children(ROOT)) > 1:
            tree.prune(rng.choice(kept))
    return tree
