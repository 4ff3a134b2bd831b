"""HATO's credit: rewards of nodes and advantages among siblings against a slow oracle, and on degenerate trees."""

import math
import random
from collections import defaultdict
from contextlib import ExitStack

import numpy as np
import pytest
import torch

from recipe.hato.credit import (
    DRAWS,
    HATO_SETTINGS,
    LOCAL_REWARDS,
    compute_hato_advantage,
    share_of_varying_groups,
    step_credit,
)
from recipe.hato.keys import HATOConfig, RewardWeights
from verl.trainer.ppo.credit.nodes import SEGMENT_IDS, tree_nodes


def settings(alpha=0.0, beta=0.5, gamma=0.5, **others) -> HATOConfig:
    return HATOConfig(reward_weights=RewardWeights(alpha=alpha, beta=beta, gamma=gamma), **others)


class Tree:
    """A prompt's steps by number; `outcomes` is the verifier's reward of each leaf.

    Args:
        shape: nested lists; a number in place of a list is a leaf with that outcome. Numbered from 1, depth first.
        draws, local: number of draws and local reward of each step, by its number; the defaults are 1 and 0.
    """

    def __init__(self, shape: list = (), draws: dict | None = None, local: dict | None = None):
        self.parent: dict[int, int | None] = {}
        self.outcomes: dict[int, float] = {}
        self.draws, self.local = defaultdict(lambda: 1, draws or {}), defaultdict(float, local or {})
        self.lengths = defaultdict(lambda: 2)
        self.tools: set[int] = set()
        self._grow(shape, None)

    def _grow(self, shape, parent):
        for child in shape:
            number = len(self.parent) + 1
            self.parent[number] = parent
            if isinstance(child, list):
                self._grow(child, number)
            else:
                self.outcomes[number] = child

    def path(self, number) -> list[int]:
        return [] if number is None else [*self.path(self.parent[number]), number]

    def children(self, number) -> list[int]:
        return [child for child, parent in self.parent.items() if parent == number]

    def answers_below(self, number) -> list[float]:
        """Each as often as the steps after `number` on its path were drawn."""
        if number in self.outcomes:
            return [self.outcomes[number]]
        below = [self.answers_below(child) * self.draws[child] for child in self.children(number)]
        return [outcome for answers in below for outcome in answers]


def random_tree(seed: int, size: int) -> Tree:
    rng, tree = random.Random(seed), Tree()
    for number in range(1, size + 1):
        options = [None] + [i for i in tree.parent if len(tree.path(i)) < 5 and i not in tree.tools]
        tree.parent[number] = rng.choice(options)
        tree.draws[number], tree.local[number] = rng.choice([1, 1, 1, 2, 3]), rng.random()
        tree.lengths[number] = rng.randrange(1, 4)
    for number in [i for i in tree.parent if not tree.children(i)]:
        if rng.random() < 0.2:  # a tool's result, then the answer
            tool, answer = len(tree.parent) + 1, len(tree.parent) + 2
            tree.parent |= {tool: number, answer: tool}
            tree.tools.add(tool)
            number = answer
        tree.outcomes[number] = rng.choice([0.0, 0.1, 1.0, 1.0, -1.0, 2.0])
    return tree


def rows_of(trees: list[Tree], seed: int = 0, padding_rows: int = 0):
    """The batch's fields, rows shuffled: (segment_ids, mask, rewards, index, local_rewards, draws)."""
    rows = [(f"prompt {i}", tree, leaf) for i, tree in enumerate(trees) for leaf in tree.outcomes]
    rows += [(f"padding {i}", Tree(), None) for i in range(padding_rows)]
    random.Random(seed).shuffle(rows)
    steps = [[step for step in tree.path(leaf) for _ in range(tree.lengths[step])] for _, tree, leaf in rows]
    shape = len(rows), max(map(len, steps), default=0) + 1
    ids, mask, draws = torch.full(shape, -1), torch.zeros(shape), torch.zeros(shape, dtype=torch.long)
    rewards, local = torch.zeros(shape), torch.zeros(shape)
    for i, ((_, tree, leaf), of_row) in enumerate(zip(rows, steps, strict=True)):
        rewards[i, -1] = tree.outcomes.get(leaf, 0.0)
        for t, step in enumerate(of_row):
            ids[i, t], mask[i, t] = step, step not in tree.tools
            draws[i, t], local[i, t] = tree.draws[step], tree.local[step]
    return ids, mask, rewards, np.array([name for name, *_ in rows], dtype=object), local, draws


def credit_of(tree: Tree, hato: HATOConfig, **options):
    ids, mask, rewards, index, *fields = rows_of([tree])
    return step_credit(tree_nodes(ids, index, mask), rewards.sum(-1), hato, *fields, **options)


def by_step(tree: Tree, credit, of_nodes: torch.Tensor) -> list[float]:
    return of_nodes[credit.nodes.segment_nodes("prompt 0", list(tree.parent))].tolist()


def advantages_of(batch, hato: HATOConfig, **config) -> torch.Tensor:
    ids, mask, rewards, index, local, draws = batch
    with ExitStack() as stack:
        for given in (SEGMENT_IDS.bound(ids), LOCAL_REWARDS.bound(local), DRAWS.bound(draws)):
            stack.enter_context(given)
        stack.enter_context(HATO_SETTINGS.bound(hato))
        advantages, returns = compute_hato_advantage(rewards, mask, index, config=config)
    assert returns is advantages
    return advantages


# -- what does not train --

WRONG = Tree([[0.0, 0.0], [0.0, [0.0, 0.0]]], local={1: 0.2, 2: 0.9, 3: 0.1, 4: 0.7, 5: 0.4, 6: 0.6, 7: 0.3, 8: 0.5})


def test_a_problem_without_a_right_answer_trains_nothing():
    """The heuristic alone used to make advantages of +-1.15 on each of its steps."""
    batch = rows_of([WRONG])
    defaults = HATOConfig()
    assert defaults.reward_weights.alpha > 0, "the heuristic has weight"
    assert advantages_of(batch, defaults).abs().max() == 0
    asked_for = advantages_of(batch, HATOConfig(train_on_local_reward_alone=True))
    assert asked_for.abs().max() > 0.3
    nothing_else = advantages_of(batch, settings(alpha=1.0, beta=0.0, gamma=0.0))
    torch.testing.assert_close(nothing_else, asked_for, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("threshold", [0.1, 0.2, 0.5, 0.7])
def test_a_reward_at_the_threshold_is_not_right(threshold):
    tree = Tree([[1.0], [threshold]])
    credit = credit_of(tree, settings(verification_threshold=threshold))
    assert set(by_step(tree, credit, credit.right)) == {0.0, 1.0}


def test_sibling_groups_without_variance_get_nothing_and_leave_the_mask():
    tree = Tree([[1.0, 1.0], [0.0, 1.0], [[1.0]]], local={3: 1.0})
    credit = credit_of(tree, settings(alpha=0.1, gamma=0.0))
    expected = [False, False, False, False, True, True, False, False, False]
    assert by_step(tree, credit, credit.step_varies) == expected, "one pair of leaves differs"
    assert [bool(x) for x in by_step(tree, credit, credit.step_advantages)] == expected
    ids, *_ = rows_of([tree])
    assert torch.equal(credit.varies, (ids == 5) | (ids == 6))
    assert share_of_varying_groups(credit).tolist() == pytest.approx([1 / 3])


def test_groups_that_differ_by_local_reward_alone_do_not_vary():
    hato = HATOConfig(train_on_local_reward_alone=True)
    for tree in (WRONG, Tree([1.0])):
        assert share_of_varying_groups(credit_of(tree, hato)).tolist() == [0]


def test_rewards_that_differ_by_rounding_are_equal():
    tree = Tree([0.1 + 0.2, 0.3, 0.3])
    assert credit_of(tree, settings(gamma=0.0)).step_advantages.abs().max() == 0


# -- against a slow version --


def successes(tree: Tree, step: int) -> list[float]:
    return [min(1.0, outcome) for outcome in tree.answers_below(step) if outcome > 0]


def slow_parts(tree: Tree, number: int, hato: HATOConfig) -> tuple[float, float, float, float]:
    """R_path, R_causal, their weighted sum and R of a step, by definition: the answers below, listed."""
    below = tree.answers_below(number)
    cut = [min(1.0, max(0.0, outcome)) for outcome in below]
    path = max(cut) if hato.path_reward == "best" else sum(cut) / len(cut)
    others = [step for step in tree.children(tree.parent[number]) if step != number]
    answers = [outcome for step in others for outcome in tree.answers_below(step) * tree.draws[step]]
    right, beside = ([outcome > hato.verification_threshold for outcome in of] for of in (below, answers))
    if hato.causal_reward == "notes":
        own = successes(tree, number)
        beside = [np.mean(of) for step in others for _ in range(tree.draws[step]) if (of := successes(tree, step))]
        if not own or number in tree.outcomes:
            causal = 0.0
        else:
            causal = max(0.0, np.mean(own) - (np.mean(beside) if beside else 0.0)) if others else path
    elif not any(right):
        causal = 0.0
    elif not others:
        causal = path
    else:
        causal = max(0.0, np.mean(right) - np.mean(beside))
    weights = hato.reward_weights
    verified = weights.beta * path + weights.gamma * causal
    return path, causal, verified, verified + weights.alpha * tree.local[number]


def slow_advantage(tree: Tree, number: int, hato: HATOConfig, norm: bool) -> float:
    """The step's siblings listed, each as often as it was drawn."""
    siblings = tree.children(tree.parent[number])
    if siblings == [number]:
        return 0.0 if tree.parent[number] is None else slow_advantage(tree, tree.parent[number], hato, norm)
    parts = {step: slow_parts(tree, step, hato) for step in siblings}
    verified, totals = ([parts[s][k] for s in siblings for _ in range(tree.draws[s])] for k in (2, 3))
    weights = hato.reward_weights
    alone = hato.train_on_local_reward_alone or weights.beta == weights.gamma == 0
    if np.ptp(totals) < 1e-9 or (np.ptp(verified) < 1e-9 and not alone):
        return 0.0
    std = np.std(totals, ddof=1) + 1e-6 if norm else 1.0
    return tree.draws[number] * (parts[number][3] - np.mean(totals)) / std


SETTINGS = [
    HATOConfig(),
    HATOConfig(causal_reward="notes"),
    HATOConfig(train_on_local_reward_alone=True, path_reward="mean"),
    settings(alpha=0.3, beta=0.0, gamma=1.0, verification_threshold=0.05),
    settings(alpha=1.0, beta=0.0, gamma=0.0),
]


@pytest.mark.parametrize("hato", SETTINGS)
@pytest.mark.parametrize("seed", range(8))
def test_random_forests_against_the_slow_version(seed, hato):
    trees = [random_tree(seed * 10 + i, size) for i, size in enumerate((1, 4, 12, 40))]
    batch = rows_of(trees, seed, padding_rows=2)
    ids, mask, rewards, index, local, draws = batch
    credit = step_credit(tree_nodes(ids, index, mask), rewards.sum(-1), hato, local, draws)
    norm = seed % 2 == 0
    advantages = advantages_of(batch, hato, norm_adv_by_std_in_grpo=norm)
    assert advantages[mask == 0].abs().max() == 0 and advantages.isfinite().all()
    for i, tree in enumerate(trees):
        of_prompt = index == f"prompt {i}"
        nodes = credit.nodes.segment_nodes(f"prompt {i}", list(tree.parent))
        for step, node in zip(tree.parent, nodes, strict=True):
            below = tree.answers_below(step)
            right = np.mean([outcome > hato.verification_threshold for outcome in below])
            path, causal, _, total = slow_parts(tree, step, hato)
            fast = credit.right, credit.local, credit.path, credit.causal, credit.total
            fast = [float(of_node[node]) for of_node in fast]
            assert fast == pytest.approx([right, tree.local[step], path, causal, total], abs=1e-6)
            if step in tree.tools:
                continue
            expected = slow_advantage(tree, step, hato, norm)
            rows, columns = ((ids == step) & torch.from_numpy(of_prompt).unsqueeze(-1)).nonzero(as_tuple=True)
            assert (advantages[rows, columns] * len(rows.unique())).tolist() == pytest.approx(
                [expected] * len(rows), rel=1e-4, abs=1e-5
            )
        every = [outcome > hato.verification_threshold for outcome in tree.answers_below(None)]
        share = credit.prompt_right[list(credit.nodes.prompts).index(f"prompt {i}")]
        assert share.item() == pytest.approx(np.mean(every))


# -- any rows --


def test_plain_responses_are_siblings_of_each_other():
    """Rows without a tree and without the data of HATO's policy are steps after the prompt, each drawn once."""
    ids = torch.full((4, 3), -1)
    rewards, mask = torch.zeros(4, 3), torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1]])
    rewards[:, 0] = torch.tensor([1.0, 0.0, 0.0, 1.0])
    with SEGMENT_IDS.bound(ids), HATO_SETTINGS.bound(HATOConfig()):
        advantages, _ = compute_hato_advantage(rewards, mask, np.array(["a", "a", "a", "b"]))
    assert advantages[0].tolist() == pytest.approx([2 / math.sqrt(3)] * 3, rel=1e-4)
    assert advantages[1].tolist() == pytest.approx([-1 / math.sqrt(3)] * 2 + [0], rel=1e-4)
    assert advantages[3].tolist() == [0, 0, 0], "nothing is beside it"


def test_a_chain_of_thousands_of_steps():
    n = 20_000
    nodes = tree_nodes(torch.arange(n).unsqueeze(0), np.array(["a"]))
    credit = step_credit(nodes, torch.ones(1), settings(beta=0.6, gamma=0.3))
    assert credit.total.tolist() == pytest.approx([0.9] * n) and credit.advantages.abs().max() == 0
