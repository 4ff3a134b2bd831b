"""What a value can tell apart, on trees made by hand."""

import math

from studies.value_auc import Step, auc, steps_of


def segment(parent, value=None, uncertainty=0.0):
    return {"parent": parent, "info": {} if value is None else {"value": value, "uncertainty": uncertainty}}


def test_steps_of_a_tree():
    """A tool's result (1) is no step, a dropped one (5) has no answer, and the last level (6) is never dropped."""
    segments = [segment(None, 0.5, 0.2), segment(0), segment(1, 0.4), segment(1, 0.3), segment(None, 0.2)]
    segments += [segment(4, 0.1), segment(2, 0.9)]
    record = {"segments": segments, "leaves": [6, 3, 4, 5], "rewards": [1.0, 0.0, 0.0, None]}
    name = ("run", 1, 0)
    assert steps_of(name, record, 0.5, 3) == [
        Step(name, 1, 0.6, True),
        Step(name, 2, 0.4, True),
        Step(name, 2, 0.3, False),
        Step(name, 1, 0.2, False),
    ]


def test_pairs_by_hand():
    def made(tree, score, right):
        return Step(("run", 1, tree), 1, score, right)

    steps = [made(0, 0.3, True), made(0, 0.1, False), made(0, 0.3, False), made(1, 0.2, True), made(1, 0.9, False)]
    assert auc(steps, lambda step: step.tree) == (1.5 / 3, 3)
    assert auc(steps, lambda step: step.depth) == ((1 + 0.5 + 0 + 1 + 0 + 0) / 6, 6)
    assert math.isnan(auc(steps[:1], lambda step: step.depth)[0])
