"""Searched trees for tests: from nested lists, and random ones."""

import random

from recipe.hato.frontier import LEAF, ROOT, Frontier
from verl.workers.rollout.trajectory_tree import TOOL, Segment, TrajectoryTree


def model(*tokens: int, log_prob: float = -1.0) -> Segment:
    return Segment(None, list(tokens), [log_prob] * len(tokens))


def tool(*tokens: int) -> Segment:
    return Segment(None, list(tokens), author=TOOL)


def frontier() -> Frontier:
    return Frontier(TrajectoryTree([100, 101]))


def grown(shape: list, tree: Frontier | None = None, parent: int = ROOT) -> Frontier:
    """A tree of nested lists; None in place of a list is a leaf. Steps are numbered depth first.

    grown([[None, None], None]): step 1 has the leaves 2 and 3, step 4 is a leaf after the problem.
    """
    tree = tree or frontier()
    for below in shape:
        number = len(tree.steps)
        tree.add(parent, [model(number, 1000 + number)], ended=below is None)
        grown(below or [], tree, number)
    return tree


def random_frontier(seed: int, size: int = 40, pruned: int = 3) -> Frontier:
    """Random steps, some of which end with a tool's result; identical siblings are frequent; a few subtrees pruned. All
    paths have ended."""
    draw = random.Random(seed)
    tree = frontier()
    for _ in range(size):
        parent = draw.choice([i for i, step in enumerate(tree.steps) if step.status != LEAF and step.depth < 5])
        tokens = [draw.randrange(4) for _ in range(draw.randrange(1, 3))]
        result = [tool(50, draw.randrange(2))] if tokens[-1] % 2 else []
        tree.add(parent, [model(*tokens, log_prob=-draw.random()), *result], ended=False)
    for number in tree.open_steps():
        tree.add(number, [model(9)], ended=True)
    for _ in range(pruned):
        if sum(tree.is_kept(child) for child in tree.steps[ROOT].children) > 1:
            tree.prune(draw.choice([i for i in range(1, len(tree.steps)) if tree.is_kept(i)]))
    return tree
