"""The proposed thresholds, by hand."""

import random

import pytest

from recipe.latr.proposal import expected_branches, latr_thresholds, probabilities, rounded
from verl.evaluation.exploration.table import Certainty, SampledGroup, Samples, Trajectory


def row(steps) -> Trajectory:
    return Trajectory(range(len(steps)), steps, False, "")


def test_expected_branches_by_hand():
    sure, unsure, nearly = Certainty(0.1, 0.95, 0.04), Certainty(0.7, 0.5, 0.4), Certainty(0.6, 0.6, 0.2)
    group = SampledGroup([1], [row([unsure, sure, unsure]), row([unsure, unsure]), row([sure, None, nearly])], 0)
    # at the first place two of three samples pass, at the second one, at the last one, too
    assert expected_branches(*probabilities(group), 0.3, 0.2) == pytest.approx((1 + 2 / 3) * (1 + 1 / 3) ** 2)
    assert expected_branches(*probabilities(group), 0.1, 0.5) == pytest.approx((1 + 2 / 3) * (1 + 1 / 3) * (1 + 2 / 3))
    assert expected_branches(*probabilities(group), 0.4, 0.2) == 1  # not above
    assert expected_branches(*probabilities(group), 0.0, 1.0) == pytest.approx(2 * (1 + 2 / 3) ** 2)


def test_a_model_that_is_never_unsure_enough_gets_the_loosest_thresholds():
    group = SampledGroup([1], [row([Certainty(0.1, 0.98, 0.02)]), row([Certainty(0.2, 0.96, 0.03)])], 0)
    proposal = latr_thresholds(Samples(8, None, [group], []))
    absolute, relative = proposal.values.values()
    names = [part.partition("=")[0] for part in proposal.line().split()]
    assert names == [f"actor_rollout_ref.rollout.kt.prob_filter_{key}_thres" for key in ("abs", "rel")]
    assert absolute <= 0.02 and relative >= 0.96
    assert "2.0 branches or more" in proposal.expected or "1.5 branches or more" in proposal.expected


@pytest.mark.parametrize("up", [True, False])
def test_rounding_keeps_two_digits_on_its_side(up):
    draw = random.Random(0)
    for _ in range(200):
        value = draw.random() ** 4
        near = rounded(value, up)
        assert near >= value if up else near <= value
        assert abs(near - value) <= 0.1 * value + 1e-12
        assert float(f"{near:.2g}") == near
