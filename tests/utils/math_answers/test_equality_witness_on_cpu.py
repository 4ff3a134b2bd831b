"""The witness against verdicts "equal" of math-verify itself, right ones and wrong ones."""

import pytest
from math_verify import LatexExtractionConfig, parse, verify

from tests.tables import table
from verl.utils.math_answers.comparison import is_equivalent
from verl.utils.math_answers.equality import is_equal
from verl.utils.math_answers.tokens import Unreadable
from verl.utils.math_answers.worker import confirms


def read_by_library(text: str) -> list:
    return parse(f"\\boxed{{{text}}}", (LatexExtractionConfig(),), parsing_timeout=None)


def library_verdict_and_witness(truth: str, answer: str) -> tuple[bool, bool]:
    gold, parsed = read_by_library(truth), read_by_library(answer)
    verdict = verify(gold, parsed, timeout_seconds=None, allow_set_relation_comp=True)
    return verdict, confirms(gold, parsed, truth, answer)


@pytest.mark.parametrize(("truth", "answer", "is_confirmed"), table(__file__, "witnesses"))
def test_wrong_verdicts_of_the_library_get_no_reward(truth, answer, is_confirmed):
    """By the witness, or for texts of which the library has left something out (None) by a comparison before it."""
    verdict, witness = library_verdict_and_witness(truth, answer)
    assert verdict and (is_confirmed is None or witness == is_confirmed)
    assert not is_equivalent(truth, answer, 60)


@pytest.mark.parametrize(
    ("truth", "answer", "is_right"),
    [
        (r"\sum_{k=1}^{\infty} \frac{1}{k^2}", r"\frac{\pi^2}{6}", True),
        (r"\sum_{k=1}^{\infty} \frac{1}{2^k}", "1", True),
        (r"\lim_{x \to 0} \frac{\sin x}{x}", "1", True),
        (r"\sum_{k=1}^{\infty} \frac{1}{k^2}", r"\frac{\pi^2}{8}", False),
        (r"\lim_{x \to 0} \frac{\sin x}{x}", "2", False),
    ],
)
def test_notations_that_only_the_library_reads(truth, answer, is_right):
    with pytest.raises(Unreadable):
        is_equal(truth, answer)
    assert library_verdict_and_witness(truth, answer) == (is_right, is_right)
    assert is_equivalent(truth, answer, 60) is is_right


def test_a_library_that_takes_everything_for_equal_gives_no_reward():
    """The witness computes by itself, whatever the library's verdict is."""
    gold = read_by_library(r"\sum_{k=1}^{\infty} \frac{1}{k^2}")
    for answer in ("1", r"\frac{\pi^2}{7}", "x", r"\text{none}", "", r"\{1, 2\}", "(1, 2)", "x=1"):
        assert not confirms(gold, read_by_library(answer), r"\sum_{k=1}^{\infty} \frac{1}{k^2}", answer)
