"""GiGPO's advantage against a slow version on random trees with tools, and a mask that it refuses."""

import numpy as np
import pytest
import torch
from verl.trainer.ppo.core_algos import get_adv_estimator_fn

from recipe.compared.gigpo.credit import RESPONSES
from tests.configs import composed
from verl.trainer.checks.parts import check_parts
from verl.workers.rollout.trajectory_tree import SEGMENT_IDS


def advantage(rewards, mask, responses, index, segment_ids=None, **keys) -> torch.Tensor:
    rewards, mask, responses = torch.tensor(rewards), torch.tensor(mask), torch.tensor(responses)
    segments = torch.full(mask.shape, -1) if segment_ids is None else torch.tensor(segment_ids)
    with SEGMENT_IDS.bound(segments), RESPONSES.bound(responses):
        index = np.array(index, dtype=object)
        return get_adv_estimator_fn("gigpo")(rewards.float(), mask.float(), index, config={"gigpo": keys})[0]


def random_batch(seed: int):
    """Trees of turns and results; half of the rows share their first turn and result with the row before."""
    generator = np.random.default_rng(seed)
    n, width = 24, 14
    index = np.sort(generator.integers(0, 3, n))
    mask, responses, segments = (np.full((n, width), fill) for fill in (0, 0, -1))
    next_segment = 0
    for row in range(n):
        column = 0
        if row and index[row] == index[row - 1] and generator.random() < 0.5:
            first = mask[row - 1].argmin()
            column = first + mask[row - 1, first:].argmax() if mask[row - 1, first:].any() else 0
            for array in (mask, responses, segments):
                array[row, :column] = array[row - 1, :column]
        for _ in range(generator.integers(1, 4)):
            for by_model, length in ((1, generator.integers(1, 4)), (0, 1)):
                stop = min(column + length, width)
                mask[row, column:stop] = by_model
                responses[row, column:stop] = generator.integers(1, 3)
                segments[row, column:stop] = next_segment
                column, next_segment = stop, next_segment + 1
    rewards = generator.integers(0, 2, (n, width)) * (segments >= 0) * generator.random((n, width))
    return rewards.astype(np.float32), mask, responses, index, segments


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("mode", ["mean_norm", "mean_std_norm"])
def test_against_a_slow_version(seed, mode):
    rewards, mask, responses, index, segments = random_batch(seed)
    weight, gamma = 0.7, 0.9
    fast = advantage(rewards, mask, responses, index, segments, mode=mode, gamma=gamma, step_advantage_w=weight)
    n, width = mask.shape

    def normalized(value, values):
        if len(values) < 2:
            return 0.0
        scale = np.std(values, ddof=1) + 1e-6 if mode == "mean_std_norm" else 1.0
        return (value - np.mean(values)) / scale

    # a turn: its prompt and observation, its tokens' columns, its return; those of a row in order
    turns = {}
    for row in range(n):
        groups = []
        for column in range(width):
            if mask[row, column] and (column == 0 or not mask[row, column - 1]):
                begin = column - 1
                while begin >= 0 and not mask[row, begin]:
                    begin -= 1
                groups.append({"observation": tuple(responses[row, begin + 1 : column]), "columns": [], "q": 0.0})
            if mask[row, column]:
                groups[-1]["columns"].append(column)
            for past, group in enumerate(reversed(groups)):
                group["q"] += gamma**past * rewards[row, column]
        turns[row] = groups
    # the path to a turn's end says which turn of the tree it is
    visits = {}
    for row in range(n):
        for turn in turns[row]:
            turn["visit"] = index[row], tuple(segments[row, : turn["columns"][-1] + 1])
            visits.setdefault(turn["visit"], (turn["observation"], []))[1].append(turn["q"])
    assert any(len(returns) > 1 for _, returns in visits.values())
    for row in range(n):
        outcomes = [rewards[other].sum() for other in range(n) if index[other] == index[row]]
        episode, expected = normalized(rewards[row].sum(), outcomes), np.zeros(width)
        for turn in turns[row]:
            alike = [
                np.mean(returns)
                for (prompt, _), (observation, returns) in visits.items()
                if prompt == index[row] and observation == turn["observation"]
            ]
            step = normalized(np.mean(visits[turn["visit"]][1]), alike)
            expected[turn["columns"]] = episode + weight * step
        np.testing.assert_allclose(fast[row].numpy(), expected, rtol=1e-3, atol=1e-3)


def test_a_mask_that_takes_tokens_of_turns_is_refused():
    config = composed("explore", "hardware=cpu", "credit=gigpo")
    config.algorithm.rollout_correction = {"rollout_rs": "token_k1"}
    with pytest.raises(ValueError, match="rollout_rs=token_k1 takes tokens out of the mask.* set it to null"):
        check_parts(config)
