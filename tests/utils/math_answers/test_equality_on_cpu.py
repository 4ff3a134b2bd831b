"""The reader of answers against pairs with verdicts given by hand, by kind, and against random expressions."""

import math
import random
import re
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path

import pytest

from tests.tables import table
from verl.utils.math_answers.comparison import compute_score
from verl.utils.math_answers.equality import is_equal
from verl.utils.math_answers.structure import readings
from verl.utils.math_answers.tokens import Unreadable

FOLDER = Path(__file__).parent
KINDS: dict[str, list[tuple[str, str, bool]]] = defaultdict(list)
for name in ("answer_pairs.txt", "answer_pairs_by_kind.txt"):
    group = name
    for line in (FOLDER / name).read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            group = line.removeprefix("# ") if name != "answer_pairs.txt" else name
        elif line:
            sign = min((sign for sign in (" == ", " != ") if sign in line), key=line.index)
            KINDS[group].append((*line.split(sign, 1), sign == " == "))
PAIRS = [pair for pairs in KINDS.values() for pair in pairs]
WRONGLY_WITHOUT_REWARD = [("42", r"\text{forty-two}", True)]  # words count as words


def verdict(truth: str, answer: str) -> bool:
    return compute_score("math", rf"so \boxed{{{answer}}}.", truth, timeout_seconds=60)["acc"] == 1.0


def is_equal_or_unreadable(truth: str, answer: str) -> bool | None:
    try:
        return is_equal(truth, answer)
    except Unreadable:
        return None


@pytest.mark.parametrize("kind", KINDS)
def test_rewards_are_those_given_by_hand(kind):
    with ThreadPoolExecutor(2) as threads:
        verdicts = list(threads.map(lambda pair: verdict(pair[0], pair[1]), KINDS[kind]))
    otherwise = [pair for pair, is_right in zip(KINDS[kind], verdicts, strict=True) if is_right != pair[2]]
    assert otherwise == [pair for pair in KINDS[kind] if pair in WRONGLY_WITHOUT_REWARD]


def test_equality_does_not_depend_on_which_is_the_truth():
    for truth, answer, _ in PAIRS:
        assert is_equal_or_unreadable(truth, answer) == is_equal_or_unreadable(answer, truth), (truth, answer)


def test_an_answer_equals_itself_and_takes_no_time():
    texts = {text for truth, answer, _ in PAIRS for text in (truth, answer)}
    start = time.thread_time()
    different = [text for text in texts if is_equal_or_unreadable(text, text) is False]
    assert different == []
    assert (time.thread_time() - start) / len(texts) < 0.02


# random formulas: an exact value by Python, and LaTeX in which each operation has several spellings


def random_formula(rng: random.Random, depth: int) -> tuple:
    if depth == 0 or rng.random() < 0.15:
        return ("number", rng.randint(1, 12)) if rng.random() < 0.5 else ("name", rng.choice("xyz"))
    kind = rng.choice(["+", "-", "*", "/", "^"])
    if kind == "^":
        return (kind, random_formula(rng, depth - 1), ("number", rng.randint(2, 3)))
    return (kind, random_formula(rng, depth - 1), random_formula(rng, depth - 1))


def spelled(formula: tuple, rng: random.Random) -> str:
    if formula[0] in ("number", "name"):
        return str(formula[1])
    left, right = (f"({spelled(part, rng)})" for part in formula[1:])
    if formula[0] in "+*" and rng.random() < 0.5:
        left, right = right, left
    spellings = {
        "+": [f"{left}+{right}", rf"{{{left}}} + {right}", rf"\left{left} + \left{right}".replace(")", r"\right)")],
        "-": [f"{left}-{right}", f"-{right} + {left}"],
        "*": [left + right, rf"{left}\cdot {right}", rf"{left} \times {right}", f"{left}*{right}"],
        "/": [f"{left}/{right}", rf"\frac{{{left}}}{{{right}}}", rf"{left}\div {right}"],
        "^": [f"{left}^{right}", f"{left}^{{{formula[2][1]}}}"],
    }  # fmt: skip
    return rng.choice(spellings[formula[0]])


def value(formula: tuple, names: dict[str, Fraction]) -> Fraction:
    if formula[0] == "number":
        return Fraction(formula[1])
    if formula[0] == "name":
        return names[formula[1]]
    left, right = (value(part, names) for part in formula[1:])
    results = {
        "+": lambda: left + right,
        "-": lambda: left - right,
        "*": lambda: left * right,
        "/": lambda: left / right,
    }
    return left ** int(right) if formula[0] == "^" else results[formula[0]]()


def changed(formula: tuple, rng: random.Random) -> tuple:
    """The formula with another operation or operand somewhere."""
    if formula[0] == "number":
        return ("number", formula[1] + 1)
    if formula[0] == "name" or rng.random() < 0.3:
        return ("+", formula, ("number", 1))
    place = rng.choice([1, 2])
    return (*formula[:place], changed(formula[place], rng), *formula[place + 1 :])


def same_for_python(one: tuple, other: tuple) -> bool | None:
    """Whether two formulas have the same values at five points; None if one has no value at some."""
    rng = random.Random(7)
    try:
        for _ in range(5):
            names = {name: Fraction(rng.randint(20, 90), rng.randint(20, 90)) for name in "xyz"}
            if value(one, names) != value(other, names):
                return False
    except (ZeroDivisionError, OverflowError):
        return None
    return True


def test_random_formulas_in_other_spellings_are_equal_and_changed_ones_are_not():
    rng = random.Random(0)
    verdicts = []
    for _ in range(600):
        formula = random_formula(rng, 3)
        for other in (formula, changed(formula, rng)):
            expected = same_for_python(formula, other)
            truth, answer = spelled(formula, rng), spelled(other, rng)
            if expected is not None and re.search(r"[xyz+*/^-]", truth + answer):
                verdicts.append(expected)
                assert is_equal(truth, answer) is expected, (truth, answer)
    assert verdicts.count(True) > 400 and verdicts.count(False) > 400


def test_random_lists_are_equal_in_any_order_and_not_with_another_number():
    rng = random.Random(1)
    for _ in range(200):
        numbers = rng.sample(range(2, 10_000), rng.randint(2, 5))
        truth = ", ".join(f"{number:,}" if rng.random() < 0.5 else str(number) for number in numbers)
        shuffled = rng.sample(numbers, len(numbers))
        assert is_equal(truth, r" \text{ and } ".join(map(str, shuffled)))
        assert is_equal(truth, "\\{" + ", ".join(map(str, shuffled)) + "\\}")
        assert not is_equal(truth, ", ".join(map(str, [*shuffled[1:], shuffled[0] + 1])))
        assert not is_equal(truth, ", ".join(map(str, shuffled[1:])))


def test_random_intervals_are_equal_to_inequalities_with_the_same_ends():
    rng = random.Random(2)
    for _ in range(100):
        low = Fraction(rng.randint(-20, 20), rng.randint(1, 9))
        high = low + Fraction(rng.randint(1, 30), 7)
        opening, closing = rng.choice("(["), rng.choice(")]")
        interval = rf"{opening}{low}, {high}{closing}"
        signs = {"(": "<", "[": r"\le"}[opening], {")": "<", "]": r"\le"}[closing]
        assert is_equal(interval, f"{low} {signs[0]} x {signs[1]} {high}")
        assert is_equal(rf"\{{x \mid {low} {signs[0]} x {signs[1]} {high}\}}", interval)
        other = {"<": r"\le", r"\le": "<"}[signs[0]]
        assert not is_equal(interval, f"{low} {other} x {signs[1]} {high}")
        assert not is_equal(interval, f"{low} {signs[0]} x {signs[1]} {high + Fraction(1, 10**12)}")


def test_rounded_roots_are_equal_up_to_a_unit_of_their_last_digit():
    rng = random.Random(4)
    for _ in range(60):
        radicand, decimals = rng.randint(2, 10**6), rng.randint(12, 20)
        if math.isqrt(radicand) ** 2 == radicand:
            continue
        digits = math.isqrt(radicand * 100**decimals)  # the root in units of the last digit, rounded down
        for units, is_right in ((0, True), (1, True), (-2, False), (3, False), (10**6, False)):
            whole, rest = divmod(digits + units, 10**decimals)
            assert is_equal(rf"\sqrt{{{radicand}}}", f"{whole}.{rest:0{decimals}}") is is_right, (radicand, units)


def test_values_that_differ_by_tiny_terms_are_not_equal():
    rng = random.Random(5)
    for _ in range(40):
        value, exponent = rng.choice([r"\sqrt{2}", r"\pi", "e", r"\cos 60^\circ", r"\ln 3"]), rng.randint(60, 1400)
        assert not is_equal(value, rf"{value}+2^{{-{exponent}}}")
        assert is_equal(value, rf"{value}+2^{{-{exponent}}}-\frac{{1}}{{2^{{{exponent}}}}}")
        assert not is_equal(f"e^{{-{exponent}}}", f"e^{{-{exponent + 1}}}")


def test_solutions_with_a_parameter_are_equal_if_they_are_the_same_set():
    rng = random.Random(6)
    for _ in range(300):
        (start, step), (other_start, other_step) = (
            (rng.randint(-6, 6), rng.choice([-3, -2, 2, 3, 4])) for _ in range(2)
        )
        sets = [
            {a + b * k for k in range(-90, 90)} & set(range(-60, 60))
            for a, b in ((start, step), (other_start, other_step))
        ]
        truth, answer = rf"x={start}+{step}k, k\in\mathbb{{Z}}", rf"x={other_step}n+{other_start}, n\in\mathbb{{Z}}"
        truth, answer = truth.replace("+-", "-"), answer.replace("+-", "-")
        assert is_equal(truth, answer) is (sets[0] == sets[1]), (truth, answer)


def test_a_number_with_a_comma_is_read_as_one_and_as_two():
    assert [len(reading.items) for reading in readings("1,234")] == [1, 2]
    assert [len(reading.items) for reading in readings("1,034")] == [1]  # no number begins with a zero


@pytest.mark.parametrize(("text",), table(__file__, "unreadable"))
def test_texts_that_are_not_read(text):
    with pytest.raises(Unreadable):
        readings(text)


@pytest.mark.parametrize(
    "text",
    [
        "9^{9^{9^{9}}}",
        "9" * 500 + "!",
        r"\binom{10^9}{10^8}",
        r"\prod_{n=1}^{99999999} n",
        r"\sum_{k=1}^{1000} \sum_{j=1}^{1000} \frac{1}{k+j}",
        "2^{" * 80 + "2" + "}" * 80,
        r"\sqrt{" * 80 + "2" + "}" * 80,
        "x^{999}" * 60,
        r"\pm 1" * 100,
        "|" * 500,
        "{" * 500,
        r"\text{a} 1 " * 40,
        r"\sin(10^{10^{8}})",
        "10^{10^{5}} + 1",
    ],
    ids=lambda text: text[:20],
)
def test_hostile_texts_are_not_equal_and_take_little_time(text):
    start = time.thread_time()
    assert is_equal_or_unreadable("2", text) is not True
    assert is_equal_or_unreadable(text, "x^2+1") is not True
    assert time.thread_time() - start < 3
