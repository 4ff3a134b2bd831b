"""Finds what stands inside and outside the brackets of an answer's tokens."""

from verl.utils.reward_score.answer_tokens import Token

OPENING = {"(": ")", "[": "]", "{": "}", "\\{": "\\}", "langle": "rangle"}
CLOSING = frozenset(OPENING.values())


def top_level(items: list[Token], signs: tuple[str, ...]) -> list[int]:
    """Return the places of the signs that stand outside all brackets."""
    places, depth = [], 0
    for place, token in enumerate(items):
        if token.kind == "command":
            depth += token.text.startswith("begin ") - token.text.startswith("end ")
        if token.kind != "sign":
            continue
        if token.text in OPENING:
            depth += 1
        elif token.text in CLOSING:
            depth -= 1
        elif depth == 0 and token.text in signs:
            places.append(place)
    return places


def split(items: list[Token], signs: tuple[str, ...]) -> tuple[list[list[Token]], list[str]]:
    """Return the parts between the signs outside all brackets, and these signs."""
    places = top_level(items, signs)
    starts, ends = [0, *(place + 1 for place in places)], [*places, len(items)]
    return [items[a:b] for a, b in zip(starts, ends, strict=True)], [items[place].text for place in places]


def without_braces(items: list[Token]) -> list[Token]:
    while len(items) > 1 and items[0].text == "{" and items[0].kind == "sign" and encloses(items):
        items = items[1:-1]
    return items


def encloses(items: list[Token]) -> bool:
    """Return whether the bracket at the start is closed by the last token."""
    depth = 0
    for place, token in enumerate(items):
        if token.kind == "sign":
            depth += (token.text in OPENING) - (token.text in CLOSING)
            if depth == 0:
                return place == len(items) - 1
    return False
