"""Scores, draws and budgets by hand; the bounds of a search hold whatever the policy does; a seed fixes the tree."""

import math
import random
from collections import Counter

import pytest

from recipe.hato.frontier import LEAF, ROOT
from recipe.hato.keys import ExplorationConfig, TreeConfig
from recipe.hato.search import Expansion, Search, branching_factors, drawn_order, ucb_grants
from tests.recipe.hato.trees import frontier, model

# the best first, nothing pruned
GREEDY = ExplorationConfig(beta_u=0.5, selection_temperature=0.0)


# -- pure functions --


def test_the_first_drawn_follows_the_softmax_and_the_second_that_of_the_rest():
    scores, draws = [0.0, 0.3, 0.6], 6000
    orders = Counter(tuple(drawn_order([4, 5, 6], scores, 0.5, seed)) for seed in range(draws))
    weights = [math.exp(score / 0.5) for score in scores]
    for first in range(3):
        for second in {0, 1, 2} - {first}:
            last = 3 - first - second
            share = weights[first] / sum(weights) * weights[second] / (weights[second] + weights[last])
            assert orders[4 + first, 4 + second, 4 + last] / draws == pytest.approx(share, abs=0.02)


def test_a_draw_follows_from_seed_and_node_alone():
    assert drawn_order([4, 5, 6], [0, 0, 0], 1.0, 3) == drawn_order([4, 5, 6], [0, 0, 0], 1.0, 3)
    both = drawn_order([4, 6], [0, 0], 1.0, 3)
    assert [n for n in drawn_order([6, 5, 4], [0, 0, 0], 1.0, 3) if n != 5] == both
    assert drawn_order([4, 5, 6, 7], [0.1, 0.9, 0.9, 0.2], 0, seed=1) == [5, 6, 7, 4]


@pytest.mark.parametrize(
    ("scores", "temperature", "expected"),
    [
        ([0.3], 1.0, [3]),
        ([0.3, 0.3], 1.0, [3, 3]),
        ([0.0, math.log(3)], 1.0, [2, 5]),  # shares 1/4 and 3/4 of six: 1.5 and 4.5, rounded up
        ([0.0, 9.0], 0.1, [1, 5]),  # from 1 to 2 * 3 - 1
        ([], 1.0, []),
    ],
)
def test_branching_follows_promise(scores, temperature, expected):
    config = TreeConfig(branching_factor=3, adaptive_branching=True)
    assert branching_factors(scores, config, temperature) == expected


def test_ucb_by_hand():
    # bounds at first: 0.5 + sqrt(ln 5 / 4) = 1.134 and 0 + sqrt(ln 5 / 1) = 1.269, then 0.5 + 0.669 and 0 + 0.946
    assert ucb_grants([0.5, 0.0], [4, 1], 1, 1.0) == [0, 1]
    assert ucb_grants([0.5, 0.0], [4, 1], 2, 1.0) == [1, 1]
    assert ucb_grants([0.5, 0.9], [3, 3], 5, 0.0) == [0, 5]
    assert ucb_grants([0.0, 0.0, 0.0], [0, 0, 0], 7, 1.0) == [3, 2, 2]
    assert ucb_grants([], [], 0, 1.0) == []


def test_grants_beyond_a_full_tree_go_to_the_next_by_ucb():
    # without a bonus the second tree, whose mean is highest, gets all grants until it is full; the first is next
    assert ucb_grants([0.5, 0.9, 0.1], [3, 3, 3], 5, 0.0, most=2) == [2, 2, 1]
    assert ucb_grants([0.5, 0.9, 0.1], [3, 3, 3], 5, 0.0, most=4) == [1, 4, 0]
    # a tree without a visit comes first, but not once it is full
    assert ucb_grants([0.0, 0.5], [0, 9], 4, 0.0, most=1) == [1, 1]
    assert ucb_grants([0.5], [3], 5, 0.0, most=0) == [0]


# -- the search --


def new_search(config: TreeConfig, exploration=GREEDY, n_leaves=8, seed=0) -> Search:
    return Search(frontier(), config, exploration, n_leaves=n_leaves, seed=seed)


def answer(search: Search, values: list[float], node: int = ROOT, ended=()) -> None:
    """Children of a node with these values; those whose index is in `ended` are leaves."""
    for i, value in enumerate(values):
        search.frontier.add(node, [model(len(search.frontier.steps))], ended=i in ended, value=value)


def test_bfs_by_hand():
    shape = {"max_depth": 3, "branching_factor": 2, "adaptive_branching": True, "spread_leaves": False}
    search = new_search(TreeConfig(**shape), n_leaves=5)
    assert search.next() == [Expansion(ROOT, 2, False)]
    answer(search, [0.2, 0.6])
    # node 2 wants 3, node 1 wants 1; there is room for three more leaves
    assert search.next() == [Expansion(1, 1, False), Expansion(2, 3, False)]
    answer(search, [0.2], 1)
    answer(search, [0.5, 0.9, 0.1], 2)
    # one slot is left and node 5 is the best; the third level runs to the end
    assert search.next() == [Expansion(n, 2 if n == 5 else 1, True) for n in (3, 4, 5, 6)]
    for node, count in ((3, 1), (4, 1), (5, 2), (6, 1)):
        answer(search, [0.0] * count, node, ended=range(count))
    assert search.next() == [] and len(search.frontier.leaves()) == 5


@pytest.mark.parametrize("algorithm", ["bfs", "beam"])
def test_spread_leaves_let_a_tree_fork_on_all_levels(algorithm):
    search = new_search(TreeConfig(max_depth=4, branching_factor=3, search_algorithm=algorithm), n_leaves=8)
    ends = []
    while expansions := search.next():
        for expansion in expansions:
            n = expansion.children
            answer(search, [0.5] * n, expansion.node, ended=range(n if expansion.to_the_end else 0))
        search._prune()  # a beam is cut when the next round starts
        ends.append(len(search.frontier.leaves()) + len(search.frontier.open_steps()))
    assert ends == [2, 3, 5, 8]


def test_dfs_goes_down_first_and_comes_back():
    search = new_search(TreeConfig(max_depth=2, branching_factor=2, search_algorithm="dfs"))
    search.next()
    answer(search, [0.2, 0.6])
    assert search.next() == [Expansion(2, 2, True)]
    answer(search, [0.0, 0.0], 2, ended=range(2))
    assert search.next() == [Expansion(1, 2, True)]
    answer(search, [0.0, 0.0], 1, ended=range(2))
    assert search.next() == []


def test_a_beam_keeps_the_best_of_a_level_and_ended_paths_compete():
    config = TreeConfig(max_depth=3, branching_factor=4, search_algorithm="beam", max_nodes_per_level=2)
    search = new_search(config)
    assert search.next() == [Expansion(ROOT, 4, False)]
    answer(search, [0.1, 0.4, 0.3, 0.2], ended=[1])
    assert [expansion.node for expansion in search.next()] == [3]
    assert [search.frontier.is_kept(n) for n in (1, 2, 3, 4)] == [False, True, True, False]


def test_pruning_by_threshold_spares_leaves_and_the_last_way():
    exploration = ExplorationConfig(beta_u=1.0, pruning_threshold=0.5, selection_temperature=0.0)
    search = new_search(TreeConfig(max_depth=3, branching_factor=3), exploration)
    search.next()
    for value, uncertainty in ((0.3, 0.1), (0.3, 0.3), (0.6, 0.0)):
        step = [model(len(search.frontier.steps))]
        search.frontier.add(ROOT, step, ended=False, value=value, uncertainty=uncertainty)
    assert [expansion.node for expansion in search.next()] == [2, 3]
    answer(search, [0.1], 2)
    answer(search, [0.2], 3)
    assert [expansion.node for expansion in search.next()] == [5], "all are poor: the best one stays"
    answer(search, [0.0], 5, ended=[0])
    assert search.next() == [] and search.frontier.leaves() == [6]

    search = new_search(TreeConfig(max_depth=3, branching_factor=3), exploration)
    search.next()
    answer(search, [0.0, 0.1], ended=[0])
    assert search.next() == [] and search.frontier.leaves() == [1], "there is an ended way: the poor ones go"


def random_config(rng: random.Random) -> TreeConfig:
    return TreeConfig(
        max_depth=rng.randrange(1, 6),
        branching_factor=rng.randrange(1, 5),
        search_algorithm=rng.choice(["bfs", "dfs", "beam"]),
        max_nodes_per_level=rng.randrange(1, 9),
        max_nodes=rng.choice([1, 2, 3, 7, 20, 200]),
        adaptive_branching=rng.random() < 0.5,
        spread_leaves=rng.random() < 0.5,
    )


@pytest.mark.parametrize("seed", range(150))
def test_a_searchs_bounds_hold(seed):
    """Against a policy that ends early now and then and repeats itself."""
    rng = random.Random(seed)
    exploration = ExplorationConfig(
        beta_u=rng.random(), pruning_threshold=rng.choice([0.0, 0.4, 0.8]), selection_temperature=rng.choice([0, 0.2])
    )
    config = random_config(rng)
    search, asked = new_search(config, exploration, rng.randrange(1, 10), seed), []
    tree = search.frontier
    while expansions := search.next():
        for expansion in expansions:
            asked.append(expansion.node)
            assert expansion.children >= 1
            for _ in range(expansion.children):
                ended = expansion.to_the_end or rng.random() < 0.2
                step = [model(rng.randrange(6), int(ended))]
                numbers = {"value": rng.random(), "uncertainty": rng.random()}
                tree.add(expansion.node, step, ended=ended, **numbers)
        assert tree.n_kept <= config.max_nodes and max(node.depth for node in tree.steps) <= config.max_depth
        search._prune()  # a beam is cut when the next round starts
        of_level = Counter(node.depth for i, node in enumerate(tree.steps) if i and tree.is_kept(i))
        assert max(of_level.values()) <= config.max_nodes_per_level
        assert 1 <= len(tree.leaves()) + len(tree.open_steps()) <= search.n_leaves
    assert asked and not tree.open_steps() and 1 <= len(tree.leaves())
    kept = [tree.steps[n] for n in range(1, len(tree.steps)) if tree.is_kept(n)]
    assert all(step.children or step.status == LEAF for step in kept)
    assert len(asked) == len(set(asked)), "a node is expanded once"
