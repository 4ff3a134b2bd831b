"""Rewards of ARPO (arXiv 2507.19849) for reasoning with search and code, in two variants:

    specification   0.2 * format + 0.8 * correctness
    published       as in the authors' code: -1 for a bad format; otherwise correctness, and 0.1 more for a right answer
                    for which every tool was called

The data source says how correctness is measured: mathematics by math-verify (0 or 1), questions by token F1. `rule`
overrides it; the authors' code uses f1 for everything. The answer is the \\boxed text in `<answer>`.
"""

from verl.utils.reward_score import math_equivalence, qa
from verl.utils.reward_score.tool_format import TOOL_TAGS, check_format

VARIANTS = ("specification", "published")
RULES = ("math", "f1", "em")
FORMAT_WEIGHT, CORRECTNESS_WEIGHT = 0.2, 0.8
BAD_FORMAT, ALL_TOOLS_BONUS = -1.0, 0.1
# data sources by what their names contain, in lower case without - and _
_MATH = ("math", "aime", "amc", "gsm8k", "olympiad", "dapo", "numina", "minerva", "deepscaler")
_QUESTIONS = ("qa", "hotpot", "wiki", "musique", "bamboogle", "questions", "gaia", "hle", "xbench", "search")


def rule_of(data_source: str) -> str:
    """`math` or `f1`, by the data source's name.

    >>> rule_of("math_dapo"), rule_of("2WikiMultihopQA")
    ('math', 'f1')

    Raises:
        ValueError: the name does not say which.
    """
    name = str(data_source).lower().replace("-", "").replace("_", "")
    if any(part in name for part in _MATH):
        return "math"
    if any(part in name for part in _QUESTIONS):
        return "f1"
    raise ValueError(
        f"data_source={data_source!r}: its name does not tell whether it is mathematics or questions; say so by "
        f"reward_rule in the row's extra_info or by rule in reward_kwargs: {', '.join(RULES)}"
    )


def check_row(data_source: str, extra_info: dict | None, rule: str | None = None, **kwargs) -> None:
    """Check a row before a run starts; preflight calls this for a row of each data source.

    Args:
        rule, kwargs: the settings of `compute_score`.

    Raises:
        ValueError: neither the row nor the settings say how the row is scored.
    """
    _one_of("rule", (extra_info or {}).get("reward_rule") or rule or rule_of(data_source), RULES)


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
        extra_info: of the row; its `reward_variant` and `reward_rule` override `variant` and `rule`.
        variant: `specification` or `published`.
        rule: how correctness is measured: `math`, `f1` (token F1) or `em` (exact match); None: see `rule_of`.
        tool_tags: the tags of the tools.
        kwargs: of `math_equivalence.compute_score`, such as `timeout_seconds`.

    Returns:
        `score`; `acc` (1 if the answer is equivalent or matches exactly, else 0); `format` (0 or 1); `correctness` in
        [0, 1]; `tool_calls`, the number of calls with a result before the first error in the format; `all_tools` (1 if
        every tool was called, else 0); `pred`, the answer's text for majority votes, empty if there is no answer.

    Raises:
        ValueError: the variant or the rule is unknown, the data source tells no rule, or the ground truth has no
            answer.
        RuntimeError: math-verify does not start.
    """
    extra_info = extra_info or {}
    variant = _one_of("variant", extra_info.get("reward_variant") or variant, VARIANTS)
    rule = _one_of("rule", extra_info.get("reward_rule") or rule or rule_of(data_source), RULES)
    report = check_format(solution_str, tool_tags)
    if rule == "math":
        result = math_equivalence.compute_score(data_source, report.answer, ground_truth, **kwargs)
    else:
        result = qa.compute_score(data_source, qa.plain_text(report.boxed or ""), ground_truth, metric=rule)
    correctness, acc = result["score"], result["acc"]
    all_tools = set(report.calls).issuperset([tool_tags] if isinstance(tool_tags, str) else tool_tags)
    if variant == "specification":
        score = FORMAT_WEIGHT * report.well_formed + CORRECTNESS_WEIGHT * correctness
    elif not report.well_formed:
        score = BAD_FORMAT
    else:
        score = correctness + ALL_TOOLS_BONUS * (all_tools and acc == 1.0)
    return {
        "score": score,
        "acc": acc,
        "format": float(report.well_formed),
        "correctness": correctness,
        "tool_calls": float(len(report.calls)),
        "all_tools": float(all_tools),
        "pred": result["pred"],
    }


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise ValueError(f"{name}={value!r}: choose {' or '.join(choices)}")
    return value
