"""Every tree with every environment, sampler, credit and loss takes a step of a real tiny model, or is refused.

tests/e2e/test_combinations_on_cpu.py runs some of them on the real stack.
"""

import numpy as np
import pytest

from tests import composition
from tests.composition import CREDITS, ENVIRONMENTS, LOSSES, PAGE, SAMPLERS, TREES, cells
from verl.utils.parts import parts


@pytest.mark.slow
def test_every_two_parts_that_go_together_take_a_step():
    """A few combinations suffice: each next one has the largest number of pairs that are still missing."""
    chosen = composition.covering_cells()
    for cell in chosen:
        composition.take_step(cell)
    allowed = {pair for cell in cells() if composition.first_refusal(cell) is None for pair in composition.pairs(cell)}
    assert {pair for cell in chosen for pair in composition.pairs(cell)} == allowed
    assert len(chosen) < len(set(cells())) / 5


def test_the_page_is_up_to_date():
    """The page lists the refused combinations and why: a new refusal changes it."""
    assert PAGE.read_text().partition(composition.MARK)[2] == composition.table(), "run python tests/composition.py"


def test_the_matrix_holds_every_part():
    registered = (
        {name for name, part in parts(kind).items() if not part.alias} for kind in ("tree", "sampler", "credit", "loss")
    )
    assert [set(TREES), set(SAMPLERS), set(CREDITS), set(LOSSES)] == list(registered)
    assert {*ENVIRONMENTS} == {"none", "tools", "chat"}
    sizes = (len(part) for part in (TREES, ENVIRONMENTS, SAMPLERS, CREDITS, LOSSES))
    assert len(set(cells())) == np.prod(list(sizes))
