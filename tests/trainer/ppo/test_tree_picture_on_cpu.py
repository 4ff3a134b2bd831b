"""A tree's picture: which segment has which line and color, and how large it is."""

import random

import numpy as np
import pytest

from verl.trainer.ppo.tree_picture import mean_rewards, segment_heights, tree_picture

BLUE, ORANGE, GRAY = (115, 178, 217), (235, 128, 97), (186, 191, 199)


def tree(parents: list[int | None], leaves: list[int], rewards: list[float | None], tokens: int = 5) -> dict:
    return {
        "segments": [{"parent": parent, "token_ids": [0] * tokens} for parent in parents],
        "leaves": leaves,
        "rewards": rewards,
    }


def test_ends_of_branches_are_lines_in_order_and_others_lie_between():
    # 0 has the children 1 and 2, 1 has 3 and 5; 4 follows the prompt as 0 does
    assert segment_heights([None, 0, 0, 1, None, 1]) == [1.25, 0.5, 2, 0, 3, 1]
    assert segment_heights([]) == []


@pytest.mark.parametrize("seed", range(5))
def test_mean_rewards_are_those_of_the_trajectories_through_a_segment(seed):
    rng = random.Random(seed)
    parents = [rng.choice([None, *range(i)]) for i in range(30)]
    leaves = [rng.randrange(30) for _ in range(12)]
    rewards = [rng.choice([None, rng.random()]) for _ in leaves]
    through: dict[int, list[float]] = {segment: [] for segment in range(30)}
    for leaf, reward in zip(leaves, rewards, strict=True):
        at: int | None = leaf
        while at is not None:
            through[at] += [] if reward is None else [reward]
            at = parents[at]
    expected = [pytest.approx(np.mean(own)) if own else None for own in through.values()]
    assert mean_rewards(parents, leaves, rewards) == expected


def has_color(picture: np.ndarray, color: tuple[int, int, int]) -> bool:
    plot = picture[:, :690, :3].astype(int)  # without the scale of colors at the right
    return bool((abs(plot - color).max(axis=2) <= 1).any())


@pytest.mark.parametrize(
    ("rewards", "colors"),
    [([1.0, 1.0], {BLUE}), ([0.0, 1.0], {ORANGE, BLUE}), ([None, 0.0], {ORANGE, GRAY})],
)
def test_colors_say_the_reward(rewards, colors):
    picture = tree_picture(tree([None, None], [0, 1], rewards))
    assert {color for color in (BLUE, ORANGE, GRAY) if has_color(picture, color)} == colors


def test_the_pictures_size_does_not_depend_on_the_tree():
    large = tree([None, *((i - 1) // 2 for i in range(1, 4000))], list(range(2000, 4000)), [3.0] * 2000)
    one_token = tree([None], [0], [0.5], tokens=1)
    sizes = {tree_picture(each).shape for each in (large, one_token, tree([None], [0], [0.0], 0), tree([], [], []))}
    assert sizes == {(350, 800, 4)}
