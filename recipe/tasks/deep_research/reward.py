"""Rewards of ARPO (arXiv 2507.19849) for reasoning with search and code, in two variants:

    specification   0.2 * format + 0.8 * correctness
    published       as in the authors' code: -1 for a bad format, by the authors' rules (`published_answer`); otherwise
                    correctness, plus 0.1 if it is above 0 and every tool's closing tag is in the response

Correctness is 0 or 1 for mathematics (`comparison`), and the token F1 for questions. The row's `ability`
determines which of the two is used, or the data source's name if the ability says neither; `rule` overrides both.
`published` uses the token F1 for everything, unless a rule is named. The answer is the \\boxed text in `<answer>`.
"""

from verl.utils.math_answers import comparison
from verl.utils.reward_score import qa
from verl.utils.reward_score.tool_format import TOOL_TAGS, check_format, check_tags, published_answer

VARIANTS = ("specification", "published")
RULES = ("math", "f1", "em")
FORMAT_WEIGHT, CORRECTNESS_WEIGHT = 0.2, 0.8
BAD_FORMAT, ALL_TOOLS_BONUS = -1.0, 0.1
# parts of abilities and data sources' names that identify mathematics and questions, in lower case without - and _
_MATH = ("math", "aime", "amc", "gsm8k", "olympiad", "dapo", "numina", "minerva", "deepscaler")
_QUESTIONS = ("qa", "hotpot", "wiki", "musique", "bamboogle", "questions", "gaia", "hle", "xbench", "search")


def rule_of(data_source: str, ability: str | None = None) -> str:
    """Return `math` or `f1`, by a row's ability, or by its data source's name if the ability says neither.

    The rows of ARPO-RL-Reasoning-10K differ in their ability only, which is `math` or `qa`.

    >>> rule_of("math_dapo"), rule_of("2WikiMultihopQA"), rule_of("math_dapo", "qa"), rule_of("hotpotqa", "reasoning")
    ('math', 'f1', 'f1', 'f1')
    """
    for text in (ability or "", data_source):
        name = str(text).lower().replace("-", "").replace("_", "")
        if any(part in name for part in _MATH):
            return "math"
        if any(part in name for part in _QUESTIONS):
            return "f1"
    raise ValueError(
        f"data_source={data_source!r}, ability={ability!r}: neither tells whether the row is mathematics or a question;"
        f" set the row's ability (math or qa), its extra_info.reward_rule or reward_kwargs.rule ({', '.join(RULES)})"
    )


def check_row(
    data_source: str,
    ground_truth,
    extra_info: dict | None = None,
    variant: str = "specification",
    rule: str | None = None,
    tool_tags=TOOL_TAGS,
    **kwargs,
) -> None:
    """Raise ValueError if `compute_score`, with the same arguments, cannot score responses to a row."""
    _, rule = _choices(data_source, extra_info, variant, rule)
    check_tags(tool_tags)
    if rule == "math":
        comparison.check_row(data_source, ground_truth)
    else:
        qa.check_row(data_source, ground_truth, metric=rule)


def compute_score(
    data_source,
    solution_str,
    ground_truth,
    extra_info=None,
    variant: str = "specification",
    rule: str | None = None,
    tool_tags=TOOL_TAGS,
    **kwargs,
) -> dict:
    """Score a trajectory.

    Args:
        ground_truth: LaTeX or a number for mathematics; for questions see `qa.gold_answers`.
        extra_info: the row's; its `reward_variant` and `reward_rule` override `variant` and `rule`. Its `ability` is
            the row's, see `data_files.extra_info_of`.
        rule: the measure of correctness: `math`, `f1` (token F1) or `em` (exact match); None: see `rule_of`, and f1
            for `published`.
        kwargs: settings of `comparison.compute_score`, such as `timeout_seconds`.

    Returns:
        `score`; `acc` (whether the answer is equivalent or matches exactly); `format` (0 or 1, by the variant's rules);
        `correctness` in [0, 1]; `tool_calls`, the number of calls with a result before the first error in the format;
        `all_tools` (whether every tool was called, or for `published`, whether every tool's closing tag occurs);
        `pred`, the answer's text for majority votes, empty if there is no answer.
    """
    check_row(data_source, ground_truth, extra_info, variant, rule, tool_tags)
    variant, rule = _choices(data_source, extra_info, variant, rule)
    report = check_format(solution_str, tool_tags)
    well_formed, answer, boxed = report.well_formed, report.answer, qa.plain_text(report.boxed or "")
    all_tools = set(report.calls).issuperset(check_tags(tool_tags))
    if variant == "published":
        published = published_answer(solution_str, tool_tags)
        well_formed = published is not None
        if published is not None:
            answer, boxed = published, comparison.last_boxed(published) or ""
            all_tools = all(f"</{tag}>" in solution_str for tag in check_tags(tool_tags))
    if rule == "math":
        result = comparison.compute_score(data_source, answer, ground_truth, **kwargs)
    else:
        result = qa.compute_score(data_source, boxed, ground_truth, metric=rule)
    correctness = result["score"]
    if variant == "specification":
        score = FORMAT_WEIGHT * well_formed + CORRECTNESS_WEIGHT * correctness
    else:
        score = correctness + ALL_TOOLS_BONUS * (all_tools and correctness > 0) if well_formed else BAD_FORMAT
    return {
        "score": score,
        "acc": result["acc"],
        "format": float(well_formed),
        "correctness": correctness,
        "tool_calls": float(len(report.calls)),
        "all_tools": float(all_tools),
        "pred": result["pred"],
    }


def _choices(data_source: str, extra_info: dict | None, variant: str, rule: str | None) -> tuple[str, str]:
    """Return the variant and the rule by which a row is scored; see `compute_score`."""
    extra_info = extra_info or {}
    variant = extra_info.get("reward_variant") or variant
    rule = extra_info.get("reward_rule") or rule or ("f1" if variant == "published" else None)
    rule = rule or rule_of(data_source, extra_info.get("ability"))
    for name, value, choices in (("variant", variant, VARIANTS), ("rule", rule, RULES)):
        if value not in choices:
            raise ValueError(f"{name}={value!r}: choose {' or '.join(choices)}")
    return variant, rule
