"""Makes the control tokens of a chat template harmless in text from outside, such as a tool's result."""

from collections.abc import Iterable

from verl.workers.rollout.tools.plain_text import clean

MARKS = tuple("<[{|")  # first characters of a chat template's control tokens


def spaced(text: str, tokens: Iterable[str]) -> str:
    """Return a text with a blank after the first character of each of these tokens: `< |im_end|>`."""
    for token in tokens:
        text = text.replace(token, token[0] + " " + token[1:])
    return text


class ControlTokens:
    """The texts that a tokenizer (of `transformers`) encodes as control tokens, such as an end of turn.

    Args:
        special: ids of the tokens that the tokenizer calls special, with their texts.
        texts: texts of special tokens, and of added tokens that look like one; longer ones first.
    """

    def __init__(self, tokenizer):
        added = tokenizer.added_tokens_decoder
        self.special = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
        self.special |= {number: token.content for number, token in added.items() if token.special}
        marks = {token.content for token in added.values() if token.content.lstrip()[:1] in MARKS}
        self.texts = sorted({*self.special.values(), *marks}, key=len, reverse=True)

    def harmless(self, text: str) -> str:
        """Return `clean(text)` without control tokens: `spaced` changes them."""
        return spaced(clean(text), self.texts)
