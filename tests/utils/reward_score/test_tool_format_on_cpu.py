"""The trajectory format against hand-given verdicts, a slow checker, and hostile text with a clock."""

import random
import time
from pathlib import Path

import pytest

from verl.utils.reward_score.tool_format import check_format

T, R, A = "<think>t</think>", "<result>r</result>", r"<answer>\boxed{1}</answer>"
S, P = "<search>q</search>", "<python>c</python>"


FORMS = Path(__file__).with_name("tool_formats.txt").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("row", [line for line in FORMS if line and line[0] != "#"])
def test_the_form_of_a_response_by_hand(row):
    text, message = row.split(" | ")
    for name, block in {"T": T, "R": R, "A": A, "S": S, "P": P, "\\n": "\n"}.items():
        text = text.replace(f"«{name}»" if len(name) == 1 else name, block)
    report = check_format(text.replace("^", ""))
    if message.startswith("calls"):
        assert (report.problem, report.position) == (None, None) and report.well_formed
        assert report.calls == message.split()[1:]
    else:
        assert (report.problem, report.position) == (message, text.index("^")) and not report.well_formed


def test_calls_answer_and_box_of_a_response():
    text = f"{T}<search> who? </search> <result>\nhe\n</result>{T}<python>\nprint(1)\n</python><result>1</result>"
    report = check_format(text + r"<answer> He: \boxed{\text{he}_{1}} and \boxed{2 </answer>")
    assert report.calls == ["search", "python"]
    assert report.answer == r" He: \boxed{\text{he}_{1}} and \boxed{2 " and report.boxed == r"\text{he}_{1}"


def test_the_answer_is_told_even_where_the_form_is_bad():
    report = check_format(r"<answer>\boxed{1}</answer> no: <answer>\boxed{2}</answer>")
    assert not report.well_formed and report.boxed == "2"
    assert check_format(T + S + r"<result><answer>\boxed{3}</answer></result>").answer is None
    assert check_format(T + S + r"<result><answer>\boxed{3}</answer>").answer is None
    assert check_format(T + S + R + P).calls == ["search"]


def test_other_tools():
    text = T + "<roll>6</roll>" + R + A
    assert check_format(text).problem == "<result> without a call"
    assert check_format(text, ["roll"]).calls == ["roll"]
    assert check_format(T + "<search>" + A, "roll").well_formed
    for bad in ("a b", "", "think", "x|y", 3):
        with pytest.raises(ValueError, match="tool_tags"):
            check_format(text, [bad])


def slow_verdict(parts: list[str]) -> bool:
    """Well-formed or not, by cancelling: whole blocks only, calls with their results, then the answer last."""
    words = " ".join(part for part in parts if part.strip()).replace(f"{S} {R}", "CALL").replace(f"{P} {R}", "CALL")
    words = words.split(" ")
    allowed = all(word in (T, "CALL", "free") for word in words[:-1])
    return allowed and words[-1] == A and T in words


def test_random_sequences_of_pieces():
    """Whole blocks and single tags in any order; a single tag makes it wrong in every place."""
    rng = random.Random(0)
    pieces = [T, T, S, P, R, R, " ", "free", "\n"]
    stray = ["<think>", "</think>", "<search>", "</search>", "</python>", "</result>", "<answer>", "</answer>", A]
    seen = {True: 0, False: 0}
    for _ in range(5000):
        parts = rng.choices(pieces, k=rng.randrange(6)) + [A] * (rng.random() < 0.9)
        if rng.random() < 0.2:
            parts.insert(rng.randrange(len(parts) + 1), rng.choice(stray))
        report = check_format("".join(parts))
        assert report.well_formed == slow_verdict(parts), (parts, report)
        seen[report.well_formed] += 1
    assert min(seen.values()) > 300


HOSTILE = [
    "<" * 1_000_000,
    "<think>" * 110_000,
    "</answer>" * 110_000,
    (S + R) * 27_000,
    (S + "<result>") * 38_000,
    T + "<answer>" + r"\boxed{" * 100_000 + "}" * 100_000 + "</answer>",
    T + "<answer>" + "{" * 500_000 + "}" * 500_000 + "</answer>",
    T + r"<answer>\boxed" + " " * 1_000_000 + "</answer>",
    "\\" * 1_000_000,
    "\ud800" * 1_000_000,
    "x" * 20_000_000,
    " " * 1_000_000 + A,
]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: f"{text[:12]!r}x{len(text)}")
def test_hostile_text_is_checked_in_linear_time(text):
    start = time.process_time()
    report = check_format(text)
    assert time.process_time() - start < 2.0
    assert report.problem is None or 0 <= report.position <= len(text)


@pytest.mark.parametrize("text", [None, b"<think>", 3, ["x"]])
def test_other_types_are_malformed(text):
    report = check_format(text)
    assert report.problem.startswith("not text") and report.answer is report.boxed is None and report.calls == []
