"""Checks trajectories with tools against the protocol of arXiv 2507.19849, and says where they break it.

    <think>…</think><search>query</search> <result>…</result><think>…</think><answer>… \\boxed{…} …</answer>

These are the rules. There is at least one think. Each tool call is followed by its result, and no result comes without
a call. There is a single answer, at the end, with a \\boxed. Blocks do not nest. Free text may stand between blocks,
but not between a call and its result or after the answer. Only a result, whose text is the tool's, may contain the
protocol's tags. All scans take linear time.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

from verl.utils.math_answers.comparison import last_boxed

TOOL_TAGS = ("search", "python")
MAX_CHARS = 1_000_000
_RESULT = re.compile(r"<result>.*?(?:</result>|\Z)", re.DOTALL)
_TAG_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


def last_tagged(text: str) -> str | None:
    """Return the content of the last closed `<answer>`; None if there is none."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end) if end >= 0 else -1
    return text[start + len("<answer>") : end] if start >= 0 else None


class FormatReport(NamedTuple):
    """The parts of a response, and the first rule that it breaks."""

    problem: str | None  # the broken rule, such as "<search> inside <think>"; None for a well-formed response
    position: int | None  # index of the character where the problem is
    answer: str | None  # content of the last closed answer outside results, even in a malformed response
    boxed: str | None  # content of the last closed \boxed in `answer` with balanced braces
    calls: list[str]  # the tags of the calls with results before the problem

    @property
    def well_formed(self) -> bool:
        return self.problem is None


class _Problem(Exception):
    """The first problem of a response: its message and position."""


class _Block(NamedTuple):
    tag: str
    start: int  # index of the opening tag's first character
    end: int  # index of the first character after the closing tag


def check_format(text: str, tool_tags: Iterable[str] = TOOL_TAGS) -> FormatReport:
    """Check a response against the protocol. Bad text never raises.

    >>> check_format(r"<think>Easy.</think><answer>It is \\boxed{4}.</answer>").boxed
    '4'
    >>> report = check_format("<think>Well <search>x</search>")
    >>> report.problem, report.position
    ('<search> inside <think>', 12)
    """
    tool_tags = check_tags(tool_tags)
    if not isinstance(text, str):
        return FormatReport(f"not text but {type(text).__name__}", 0, None, None, [])
    if len(text) > MAX_CHARS:
        return FormatReport(f"longer than {MAX_CHARS} characters", MAX_CHARS, None, None, [])
    blocks: list[_Block] = []
    calls: list[str] = []
    problem = position = None
    try:
        _find_blocks(text, tool_tags, blocks)
        _check_order(text, tool_tags, blocks, calls)
    except _Problem as first:
        problem, position = first.args
    answer = last_answer(text)
    boxed = last_boxed(answer) if answer is not None else None
    if problem is None and boxed is None:
        problem, position = "no \\boxed{…} in the answer", blocks[-1].start
    return FormatReport(problem, position, answer, boxed, calls)


def last_answer(text: str) -> str | None:
    """Return the content of the last closed `<answer>` that is not in a result; None if there is none."""
    return last_tagged(_RESULT.sub("", text))


def published_answer(text: str, tool_tags: Iterable[str] = TOOL_TAGS) -> str | None:
    """Return the content of `<answer>` if the format is good by the rules of the paper's published code, else None.

    These rules count tags anywhere, also in results: equal numbers of <think> and </think>, at least one; a single
    <answer>, then a single </answer>, and the last \\boxed between them closed; and after every call's opening tag its
    closing tag, <result> and </result>, in this order. Any text may stand between, within and after them.

    >>> published_answer(r"<think>Easy.</think><answer>\\boxed{4}</answer> Done.")
    '\\\\boxed{4}'
    """
    if not isinstance(text, str) or len(text) > MAX_CHARS:
        return None
    if not 0 < text.count("<think>") == text.count("</think>"):
        return None
    if not text.count("<answer>") == text.count("</answer>") == 1:
        return None
    if not all(_has_results(text, tag) for tag in check_tags(tool_tags)):
        return None
    _, _, answer = text.partition("</answer>")[0].partition("<answer>")
    last_box = answer.rfind("\\boxed{")
    return answer if last_box >= 0 and last_boxed(answer[last_box:]) is not None else None


def _has_results(text: str, tag: str) -> bool:
    """Return whether each call is closed and followed by a result; the search for the next call starts behind it."""
    result_end = 0
    while (start := text.find(f"<{tag}>", result_end)) >= 0:
        closed, result = text.find(f"</{tag}>", start), text.find("<result>", start)
        result_end = text.find("</result>", result)
        if not start < closed < result < result_end:
            return False
    return True


def check_tags(tool_tags: Iterable[str]) -> tuple[str, ...]:
    """Return the tags of tools as a tuple; raise ValueError for one that is no name or is the protocol's own."""
    tool_tags = (tool_tags,) if isinstance(tool_tags, str) else tuple(tool_tags)
    for tag in tool_tags:
        if not isinstance(tag, str) or not _TAG_NAME.fullmatch(tag) or tag in ("think", "result", "answer"):
            raise ValueError(f"tool_tags: {tag!r} must be a name such as search, other than think, result and answer")
    return tool_tags


def _find_blocks(text: str, tool_tags: tuple[str, ...], blocks: list[_Block]) -> None:
    """Append the text's blocks to `blocks` in order; raise `_Problem` at the first tag that is unpaired or nested."""
    names = "|".join(("think", "result", "answer", *tool_tags))
    opening: re.Match | None = None
    for tag in re.finditer(f"<(?P<slash>/?)(?P<name>{names})>", text):
        if opening is None:
            if tag["slash"]:
                raise _Problem(f"{tag[0]} without <{tag['name']}>", tag.start())
            opening = tag
        elif tag["slash"] and tag["name"] == opening["name"]:
            blocks.append(_Block(tag["name"], opening.start(), tag.end()))
            opening = None
        elif opening["name"] != "result":
            raise _Problem(f"{tag[0]} inside {opening[0]}", tag.start())
    if opening is not None:
        raise _Problem(f"{opening[0]} is not closed", opening.start())


def _check_order(text: str, tool_tags: tuple[str, ...], blocks: list[_Block], calls: list[str]) -> None:
    """Append the tags of calls with results to `calls`; raise `_Problem` if the order or number of blocks is wrong."""
    call: _Block | None = None  # the call whose result comes next
    answer: _Block | None = None
    for block in blocks:
        if answer is not None:
            problem = "a second <answer>" if block.tag == "answer" else f"<{block.tag}> after the answer"
            raise _Problem(problem, block.start)
        if call is not None:
            if block.tag != "result" or text[call.end : block.start].strip():
                raise _Problem(f"no <result> right after </{call.tag}>", call.end)
            calls.append(call.tag)
            call = None
        elif block.tag == "result":
            raise _Problem("<result> without a call", block.start)
        elif block.tag == "answer":
            answer = block
        elif block.tag in tool_tags:
            call = block
    if call is not None:
        raise _Problem(f"no <result> right after </{call.tag}>", call.end)
    if answer is None:
        raise _Problem("no <answer>", len(text))
    if text[answer.end :].strip():
        raise _Problem("text after the answer", answer.end)
    if all(block.tag != "think" for block in blocks):
        raise _Problem("no <think>", 0)
