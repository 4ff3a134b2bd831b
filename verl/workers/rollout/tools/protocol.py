"""The text protocol of tool-using trajectories, in tokens.

    <think>…</think><search>q</search> <result>\n…\n</result><think>…</think><answer>…</answer>
    model, mask 1 ───────────────────┘└ tool, mask 0 ──────┘└ model, mask 1 ────────────────

Token ids are appended, never decoded and encoded again, so that training sees the sampled tokens. A tool's result is
encoded separately.
"""

import copy
from bisect import bisect_left
from collections.abc import Sequence

from verl.workers.rollout.tools.plain_text import PROTOCOL_TAGS, ControlTokens, neutral

MAX_CHARS_PER_TOKEN = 64  # a result is cut at this many characters per allowed token before it is encoded


def stops_after(text: str, marks: Sequence[str]) -> list[str]:
    """Return the texts that complete a mark after `text`: each mark, and the rest of a mark that `text` ends within.

    >>> stops_after("2 + 2</py", ["</python>"])
    ['</python>', 'thon>']
    """
    rests = [mark[size:] for mark in marks for size in range(1, len(mark)) if text.endswith(mark[:size])]
    return [*marks, *rests]


class Protocol:
    """The protocol for a tokenizer (of `transformers`) and the tags of the tools."""

    def __init__(self, tokenizer, tags: Sequence[str]):
        self.tokenizer = tokenizer
        self.closing = {f"</{tag}>": tag for tag in tags}
        self.tags = sorted({*PROTOCOL_TAGS, *tags})
        self.control_tokens = ControlTokens(tokenizer)

    def with_tools(self, tags: Sequence[str]) -> "Protocol":
        """Return the protocol in which only calls of these tools end a turn; tags of all stay harmless in results."""
        limited = copy.copy(self)
        limited.closing = {mark: tag for mark, tag in self.closing.items() if tag in tags}
        return limited

    def text_of(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def first_call(self, token_ids: Sequence[int]) -> tuple[int, str] | None:
        """Return (number of tokens up to the one in which the first tool's tag closes, tag); None if none closes."""
        if not self._closed(self.text_of(token_ids)):
            return None
        lengths = range(len(token_ids))
        n = bisect_left(lengths, True, key=lambda length: self._closed(self.text_of(token_ids[:length])) is not None)
        return n, self._closed(self.text_of(token_ids[:n]))

    def _closed(self, text: str) -> str | None:
        closings = [(text.find(mark), tag) for mark, tag in self.closing.items() if mark in text]
        return min(closings)[1] if closings else None

    def stops(self, token_ids: Sequence[int]) -> list[str]:
        """Return the stop strings after `token_ids`: the tools' closing tags, and the rest of one that has begun."""
        return stops_after(self.text_of(token_ids[-32:]), list(self.closing))

    def call(self, token_ids: Sequence[int]) -> tuple[str, str | None]:
        """Return the first call in tokens with a closing tool tag: the tag, and the text since its last opening tag,
        without outer white space; None for the text without an opening tag."""
        text = self.text_of(token_ids)
        tag = self._closed(text)
        before = text[: text.index(f"</{tag}>")]
        opened = before.rfind(f"<{tag}>")
        return tag, None if opened < 0 else before[opened + len(tag) + 2 :].strip()

    def result_ids(self, text: str, max_tokens: int) -> list[int]:
        """Return a tool's result as the model sees it, cut to `max_tokens` and made harmless; [] if not even the tags,
        and one token of a text, fit."""
        text = self.harmless(text[: MAX_CHARS_PER_TOKEN * max(max_tokens, 0)]).strip()
        opening, closing = self._encode(" <result>\n"), self._encode("\n</result>")
        if len(opening) + len(closing) + bool(text) > max_tokens:
            return []
        whole = self._encode(f" <result>\n{text}\n</result>")
        if len(whole) <= max_tokens:
            return whole
        return [*opening, *self._encode(text)[: max_tokens - len(opening) - len(closing)], *closing]

    def harmless(self, text: str) -> str:
        """Return a text from outside with tags of the protocol and control tokens made harmless."""
        return self.control_tokens.harmless(neutral(text, self.tags))

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))
