"""Both variants of ARPO's reward against scores worked out by hand."""

import time

import pytest

from verl.utils.reward_score import deep_research, math_equivalence
from verl.utils.reward_score.deep_research import rule_of

T, S, P = "<think>t</think>", "<search>q</search>", "<python>c</python>"
R = " <result>\nr\n</result>"


def answer(boxed: str) -> str:
    return rf"<answer>\boxed{{{boxed}}}</answer>"


def score(text: str, truth="Barack Obama", source="hotpotqa", **options) -> dict:
    return deep_research.compute_score(source, text, truth, **options)


GOOD, ALL_TOOLS = T + answer("Barack Obama"), T + S + R + P + R + answer("Barack Obama")
HALF = T + S + R + P + R + answer("Obama")  # F1 2/3


@pytest.mark.parametrize(
    ("text", "specification", "published"),
    [
        (GOOD, 1.0, 1.0),
        (ALL_TOOLS, 1.0, 1.1),
        (T + S + R + S + R + answer("Barack Obama"), 1.0, 1.0),  # one tool twice
        (HALF, 0.2 + 0.8 * 2 / 3, 2 / 3),  # both tools, but not right
        (T + answer("Trump"), 0.2, 0.0),
        (answer("Barack Obama"), 0.8, -1.0),  # no think
        (ALL_TOOLS + "!", 0.8, -1.0),
        (T + "<answer>Barack Obama</answer>", 0.0, -1.0),
        (T + answer(r"\text{Barack Obama}"), 1.0, 1.0),
        ("", 0.0, -1.0),
        (None, 0.0, -1.0),
    ],
)
def test_questions(text, specification, published):
    assert score(text)["score"] == pytest.approx(specification)
    assert score(text, variant="published")["score"] == pytest.approx(published)


def test_the_parts():
    assert score(HALF) == pytest.approx(
        {
            "score": 0.2 + 0.8 * 2 / 3,
            "acc": 0.0,
            "format": 1.0,
            "correctness": 2 / 3,
            "tool_calls": 2.0,
            "all_tools": 1.0,
            "pred": "obama",
        }
    )
    keys = score(HALF).keys()
    for other in (score(""), score(answer("1"), 1, "math500"), score(GOOD, variant="published", rule="em")):
        assert other.keys() == keys  # verl collects them as columns


@pytest.mark.parametrize(
    ("boxed", "specification", "published"), [("0.5", 1.0, 1.0), (r"\frac12", 1.0, 1.0), ("0.4", 0.2, 0.0)]
)
def test_mathematics_by_equivalence(boxed, specification, published):
    for variant, expected in (("specification", specification), ("published", published)):
        result = score(T + answer(boxed), r"\frac{1}{2}", "aime24", variant=variant)
        assert result["score"] == pytest.approx(expected)


def test_the_rule_can_be_named():
    assert score(HALF, rule="em")["score"] == pytest.approx(0.2)
    assert score(T + answer("0.5"), "1/2", "aime24", rule="f1")["score"] == pytest.approx(0.2)
    assert score(T + answer("0.5"), "1/2", "unheard-of", rule="math")["score"] == pytest.approx(1.0)


def test_the_row_wins_over_the_config():
    row = {"reward_variant": "published", "reward_rule": "em", "index": 3}
    assert score(HALF, extra_info=row, variant="specification", rule="f1")["score"] == 0.0
    assert score(HALF, extra_info={"reward_variant": None})["score"] == pytest.approx(0.2 + 0.8 * 2 / 3)


def test_other_tools_make_another_bonus():
    text = T + S + R + answer("Barack Obama")
    assert score(text, variant="published", tool_tags=["search"])["score"] == pytest.approx(1.1)
    assert score(text, variant="published", tool_tags="search")["score"] == pytest.approx(1.1)


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        *[(name, "math") for name in ("AIME24", "aime25", "MATH500", "gsm8k", "openai/gsm8k", "MATH", "math_dapo")],
        *[(name, "f1") for name in ("WebWalkerQA", "hotpotqa", "2WikiMultihopQA", "MuSiQue", "Bamboogle")],
        *[(name, "f1") for name in ("GAIA", "HLE", "xbench-DeepSearch")],
    ],
)
def test_the_papers_13_benchmarks_have_a_rule(source, rule):
    assert rule_of(source) == rule


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"variant": "paper"}, "variant='paper': choose specification or published"),
        ({"rule": "bleu"}, "rule='bleu'"),
        ({"extra_info": {"reward_variant": "x"}}, "variant='x'"),
        ({"source": "unheard-of"}, "data_source='unheard-of'.*reward_rule"),
        ({"truth": []}, "ground_truth"),
    ],
)
def test_mistakes_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        score(GOOD, **options)


@pytest.mark.parametrize(
    "text",
    ["<" * 1_000_000, T + answer("{" * 200_000 + "}" * 200_000), T + answer("x " * 500_000), "\x00\ud800" * 500_000],
    ids=["angles", "braces", "words", "characters"],
)
@pytest.mark.parametrize("source", ["hotpotqa", "math500"])
def test_hostile_text(text, source):
    start = time.process_time()
    assert score(text, "7", source)["acc"] == 0.0
    assert time.process_time() - start < 2.0


def test_hostile_characters_in_an_answer():
    for boxed in ("\ud800", "\x00", "\x00\ud800 x"):
        assert score(T + answer(boxed), "7")["acc"] == score(T + answer(boxed), "7", "math500")["acc"] == 0.0


def test_the_time_limit_reaches_the_comparison(monkeypatch):
    seen = []
    monkeypatch.setattr(math_equivalence, "is_equivalent", lambda *given: bool(seen.append(given[-1])))
    score(T + answer("0.5"), "1/2", "aime24", timeout_seconds=0.5)
    assert seen == [0.5]
