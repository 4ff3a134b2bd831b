"""Both variants of ARPO's reward against scores worked out by hand."""

import time

import pytest

from recipe.tasks.deep_research import reward as deep_research
from tests.tables import table
from verl.utils.math_answers import comparison

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
        (HALF, 0.2 + 0.8 * 2 / 3, 2 / 3 + 0.1),  # both tools, and partly right
        (T + S + R + P + R + answer("Trump"), 0.2, 0.0),  # both tools, but nothing of it is right
        (T + answer("Trump"), 0.2, 0.0),
        (answer("Barack Obama"), 0.8, -1.0),  # no think
        (ALL_TOOLS + "!", 0.8, 1.1),  # the authors' format does not mind text after the answer
        (T + "<answer>Barack Obama</answer>", 0.0, -1.0),
        (T + answer(r"\text{Barack Obama}"), 1.0, 0.5),  # the words "textbarack" and "obama": F1 2 * 1 / (2 + 2)
        ("", 0.0, -1.0),
        (None, 0.0, -1.0),
    ],
)
def test_questions(text, specification, published):
    assert score(text)["score"] == pytest.approx(specification)
    assert score(text, variant="published")["score"] == pytest.approx(published)


@pytest.mark.parametrize(("text", "score_by_authors"), table(__file__, "forms of the authors"))
def test_the_authors_format(text, score_by_authors):
    result = score(text, variant="published")
    assert result["score"] == pytest.approx(score_by_authors)
    assert result["format"] == float(score_by_authors >= 0)


def test_the_parts():
    parts = {"score": 0.2 + 0.8 * 2 / 3, "acc": 0.0, "format": 1.0, "correctness": 2 / 3}
    parts |= {"tool_calls": 2.0, "all_tools": 1.0, "pred": "obama"}
    assert score(HALF) == pytest.approx(parts)
    for other in (score(""), score(answer("1"), 1, "math500"), score(GOOD, variant="published", rule="em")):
        assert other.keys() == parts.keys()  # verl collects them as columns


@pytest.mark.parametrize(("boxed", "truth", "source", "options", "expected"), table(__file__, "rules"))
def test_the_row_chooses_the_rule_before_the_config_and_its_ability_before_the_data_source(
    boxed, truth, source, options, expected
):
    assert score(T + answer(boxed), truth, source, **options)["score"] == pytest.approx(expected)


def test_other_tools_make_another_bonus():
    text = T + S + R + answer("Barack Obama")
    assert score(text, variant="published", tool_tags=["search"])["score"] == pytest.approx(1.1)
    assert score(text, variant="published", tool_tags="search")["score"] == pytest.approx(1.1)
    unclosed = T + "<roll>6" + R + answer("Barack Obama")
    assert score(unclosed, variant="published", tool_tags="roll")["score"] == -1.0


@pytest.mark.parametrize(("source", "truth", "options", "message"), table(__file__, "refused rows"))
def test_a_row_is_refused_before_a_run_as_it_is_by_the_reward(source, truth, options, message):
    for function in (deep_research.check_row, lambda source, *rest, **more: score(GOOD, rest[0], source, **more)):
        with pytest.raises(ValueError, match=message):
            function(source, truth, **options)


def test_good_rows_are_not_refused():
    deep_research.check_row("hotpotqa", ["Obama", "B. Obama"], None)
    deep_research.check_row("aime24", 204, {"reward_rule": None}, timeout_seconds=1.0)
    deep_research.check_row("unheard-of", "1", {"reward_rule": "math"})
    deep_research.check_row("unheard-of", "1", None, variant="published")


@pytest.mark.parametrize(
    "text",
    [
        "<" * 1_000_000,
        T + answer("{" * 200_000 + "}" * 200_000),
        T + answer("x " * 500_000),
        "\x00\ud800" * 500_000,
        "<search>" * 100_000,
    ],
    ids=["angles", "braces", "words", "characters", "calls"],
)
@pytest.mark.parametrize("source", ["hotpotqa", "math500"])
def test_hostile_text(text, source):
    start = time.process_time()
    assert score(text, "7", source)["acc"] == score(text, "7", source, variant="published")["acc"] == 0.0
    assert time.process_time() - start < 2.0


def test_the_time_limit_reaches_the_comparison(monkeypatch):
    seen = []
    monkeypatch.setattr(comparison, "is_equivalent", lambda *given: bool(seen.append(given[-1])))
    score(T + answer("0.5"), "1/2", "aime24", timeout_seconds=0.5)
    assert seen == [0.5]
