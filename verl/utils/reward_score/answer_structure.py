"""Reads an answer's text as what it is: a list, a tuple, an interval, an equation, a quantity with a unit, a choice.

`readings` gives every structure that the text can mean, such as 1,234 as a number or as two.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise, product
from typing import Any

from verl.utils.reward_score import answer_kinds as kinds
from verl.utils.reward_score.answer_brackets import OPENING, encloses, split, top_level, without_braces
from verl.utils.reward_score.answer_formula import name_of, parse_formula
from verl.utils.reward_score.answer_kinds import BOUND, INTEGER, RELATIONS
from verl.utils.reward_score.answer_tokens import Token, Unreadable, cleaned, joined_thousands, tokens
from verl.utils.reward_score.answer_units import compound, is_unit, quantities, unit_name, with_units_as_words
from verl.utils.reward_score.answer_words import TELLING, UNITS, WORD_MEANINGS
from verl.utils.reward_score.latex_spelling import NUMBER_WORDS

MAX_SIGNS = 4
MOST_LISTED = 200
_SEPARATORS = (",", ";", "quad", "or", "\\\\")
_SET_OPERATORS = ("cup", "cap", "minus")
_CHOICE = re.compile(
    r"(?:\\(?:text|textbf|mathrm|mathbf|textrm|bf)\s*\{\s*)?"
    r"(?:\(\s*([A-Fa-f])\s*\)|([A-F]|[a-f](?=[.)]\s))\s*(?=[.:)]))\s*[.:)]?(?:\s|\\ |~)*\}?"
)
_AFTER_LABEL = re.compile(r"[A-Z]\s*=")
_AFTER_PARENTHESES = re.compile(r"\\(?:cdot|times|cup|cap|in|le|ge|leq|geq|to|pm)(?![a-z])|[A-Z]\s*=|\([^,]*\)$")
_LETTERS_OF_SETS = frozenset("R Z N Q C Z+ N* N+ N^* N^+ Z^+".split())
_ROWS = ("begin cases", "begin aligned", "begin array")


def readings(answer: str) -> list[kinds.Listing | kinds.Choice]:
    """Return every structure that an answer's text can mean.

    Raises:
        Unreadable: there is none.
    """
    text = cleaned(answer)
    label = _CHOICE.match(text)
    texts = [joined_thousands(text)]
    if not re.search(r"\d,0", text) and texts[0] != text:
        texts.append(text)
    if label and _is_choice(text[label.end() :], label[0]):
        letter = (label[1] or label[2]).upper()
        return [
            kinds.Choice(letter, content)
            for content in readings(text[label.end() :])
            if isinstance(content, kinds.Listing)
        ]
    results: list[kinds.Listing | kinds.Choice] = []
    problem = Unreadable("nothing")
    for spelled in texts:
        for independent in (False, True) if len(re.findall(r"\\pm|\\mp", spelled)) > 1 else (False,):
            try:
                items = tokens(spelled)
                results.append(_StructureReader(independent).listing(items))
                if (renamed := _with_parameter(items)) != items:
                    results.append(_StructureReader(independent).listing(renamed))
            except Unreadable as error:
                problem = error
    if not results:
        raise problem
    return results


def _with_parameter(items: list[Token]) -> list[Token]:
    """Return the tokens with INTEGER in place of the symbol that is said to be in Z."""
    for place in range(len(items) - 2):
        following = [token.text for token in items[place + 1 : place + 7]]
        if (
            items[place].kind == "symbol"
            and following[:4] == ["in", "mathbb", "{", "Z"]
            and following[5:]
            not in (
                ["^"],
                ["_"],
            )
        ):
            name = items[place].text
            return [replace(token, text=INTEGER) if token.text == name else token for token in items]
    return items


def _is_choice(rest: str, label: str) -> bool:
    """Return whether what follows a label is another text, not the rest of the same formula, as in (a)+b or A:B=2:1."""
    if not rest.strip("} ") or rest[0] in "+*/^_=!<>,;:'|)" or (rest[0] == "-" and label.strip()[-1] not in ".:"):
        return False
    is_apart = label[-1] in " .:)~}" or rest[0] == "("
    return is_apart and not (_AFTER_PARENTHESES if label.endswith(")") else _AFTER_LABEL).match(rest)


class _StructureReader:
    """A reader of structures, for which several signs ± in an item are all the same sign or independent."""

    def __init__(self, independent: bool):
        self.independent = independent

    def listing(self, items: list[Token]) -> kinds.Listing:
        """Read items with separators between them."""
        items = without_braces(items)
        parts, signs = split(items, _SEPARATORS)
        parts = [part for part in parts if part]
        if not parts:
            raise Unreadable("nothing")
        results: list[Any] = []
        for part in parts:
            for piece in _with_condition_apart(part):
                for spelled in self._signed(piece):
                    results.extend(self._items(spelled))
        if any(getattr(item, "unit", "") in ("h", "min") for item in results):
            results = compound(results)
        return kinds.Listing(_with_middle(tuple(results)), "or" in signs)

    def _signed(self, items: list[Token]) -> Iterator[list[Token]]:
        """Return the item for each sign of ±; those in braces of a set belong to its elements."""
        places, depth = [], 0
        for place, token in enumerate(items):
            if token.kind == "sign":
                depth += (token.text == "\\{") - (token.text == "\\}")
                if depth == 0 and token.text in ("pm", "mp"):
                    places.append(place)
        if len(places) > MAX_SIGNS:
            raise Unreadable("too many signs")
        if any(items[place].text == "mp" for place in places) or not self.independent:
            choices: Any = ("+" * len(places), "-" * len(places)) if places else ("",)
        else:
            choices = product("+-", repeat=len(places))
        for signs in choices:
            spelled = list(items)
            for place, sign in zip(places, signs, strict=True):
                is_plus = (sign == "+") == (items[place].text == "pm")
                spelled[place] = Token("sign", "+" if is_plus else "-", items[place].spaced)
            yield spelled

    def _items(self, items: list[Token]) -> list[Any]:
        """Return the structure of an item; of cases, that of each row."""
        items = without_braces(items)
        if items and items[0].text in _ROWS and items[-1].text.startswith("end "):
            rows, _ = split(items[1:-1], ("\\\\",))
            cells = [_without_alignment(_with_condition_marked(row)) for row in rows if row]
            if items[0].text != "begin array" or all(top_level(row, RELATIONS) for row in cells):
                return [item for row in cells for item in self.listing(row).items]
        structure = self.item(items)
        return quantities(structure) if isinstance(structure, kinds.Phrase) else [structure]

    def item(self, items: list[Token]) -> Any:
        """Read an item that is no list: a chain of relations, or a value."""
        sides, relations = split(items, RELATIONS)
        if relations and not sides[0] and relations[0] == "=":
            sides, relations = sides[1:], relations[1:]
        if not relations:
            return self.value(sides[0])
        values = []
        for side in sides:
            rows = self._items(side) if side else []
            if not rows:
                raise Unreadable("a relation without a side")
            values.append(rows[0] if len(rows) == 1 else kinds.Listing(tuple(rows)))
        if relations[-1] in ("in", "notin") and isinstance(values[-1], kinds.Formula):
            name = values[-1].text.removesuffix("inbold")
            values[-1] = kinds.NamedSet(name) if name in _LETTERS_OF_SETS else values[-1]
        return kinds.Chain(tuple(values), tuple(relations))

    def value(self, items: list[Token]) -> Any:
        """Read what stands on a side of a relation, or alone."""
        items = without_braces(items)
        if not items:
            raise Unreadable("nothing")
        if len(items) == 1 and items[0].text == "dots":
            return kinds.Words("...")
        if _is_named_point(items):
            name = items[0].text
            return kinds.Chain((kinds.Formula(("symbol", name), text=name), self._bracketed(items[1:])), ("=",))
        if places := top_level(items, _SET_OPERATORS):
            place = places[-1]
            return kinds.SetOperation(items[place].text, self.value(items[:place]), self.value(items[place + 1 :]))
        if (set_name := _named_set(items)) is not None:
            return kinds.NamedSet(set_name)
        if (bracketed := self._bracketed(items)) is not None:
            return bracketed
        return self._quantity(items)

    def _bracketed(self, items: list[Token]) -> Any:
        opening, closing = items[0].text, items[-1].text
        if len(items) < 2 or items[0].kind != "sign" or items[-1].kind != "sign":
            return None
        if opening == "\\{" and closing == "\\}" and len(items) == 2:
            return kinds.NamedSet("O")
        inner = items[1:-1]
        is_outward = opening == "]" and closing in ("[", "]") or (opening == "[" and closing == "[")
        if is_outward and len(top_level(inner, (",", ";"))) == 1:
            opening, closing = opening.replace("]", "("), closing.replace("[", ")")
        elif opening not in OPENING or opening == "{" or not encloses(items):
            return None
        opening, closing = opening.replace("langle", "("), closing.replace("rangle", ")")
        if opening == "\\{":
            return self._set(inner)
        content = self.listing(inner)
        if len(content.items) == 1:
            return content.items[0] if (opening, closing) == ("(", ")") or closing == "]" else None
        return kinds.Bracketed(opening, closing, content.items)

    def _set(self, inner: list[Token]) -> Any:
        bars = top_level(inner, ("|",))
        colons = top_level(inner, (":",))
        place = bars[0] if len(bars) % 2 and bars[0] > 0 else colons[0] if colons and not bars else None
        if place is None or not top_level(inner[place + 1 :], RELATIONS):
            return kinds.Bracketed("{", "}", self.listing(inner).items)
        head, rest = inner[:place], inner[place + 1 :]
        variable = head[0].text if head[0].kind == "symbol" and (len(head) == 1 or head[1].text == "in") else None
        domain = [*head, Token("sign", ",")] if len(head) > 1 and head[1].text == "in" else []
        if variable:
            rest = [replace(token, text=BOUND) if token.text == variable else token for token in [*domain, *rest]]
            head = [Token("symbol", BOUND)]
        return kinds.Builder(self.value(head), self.listing(rest))

    def _quantity(self, items: list[Token]) -> Any:
        """Read a formula, words, or both."""
        items = with_units_as_words(items)
        if all(token.kind == "word" for token in items):
            return _words(items)
        currency = next((token.text for token in items if token.text in ("$", "€", "£", "¥")), "")
        items = [token for token in items if token.text != currency or token.kind != "sign"]
        if not items:
            raise Unreadable("a currency without an amount")
        start = next((place for place, token in enumerate(items) if token.kind == "word"), len(items))
        if start == len(items):
            return self._ratio_or_formula(items, UNITS.get(currency, ""))
        if start > 0 and items[start - 1].text not in ("+", "-", "*", "times", "/", "^") and is_unit(items[start:]):
            return self._ratio_or_formula(items[:start], unit_name(name_of(items[start:])))
        if all(len(token.text) < 3 and token.text.lower() not in TELLING for token in items if token.kind == "word"):
            try:
                return kinds.Formula(parse_formula(items), text=name_of(items).replace(" ", ""))
            except Unreadable:
                pass  # the words are a phrase, then
        return self._phrase(items)

    def _phrase(self, items: list[Token]) -> kinds.Phrase:
        parts: list[Any] = []
        run: list[Token] = []
        for token in [*items, Token("word", "")]:
            if token.kind != "word":
                run.append(token)
                continue
            if run:
                parts.append(self._part(run))
            run = []
            parts.append(kinds.Words(unit_name(token.text)))
        return kinds.Phrase(tuple(parts[:-1]))

    def _part(self, run: list[Token]) -> Any:
        try:
            return self.item(run)
        except Unreadable:
            return kinds.Words(name_of(run))

    def _ratio_or_formula(self, items: list[Token], unit: str) -> Any:
        terms, colons = split(items, (":",))
        text = name_of(items).replace(" ", "")
        if items[-1].text == "%":
            items, unit = items[:-1], "%"
        if colons:
            return kinds.Ratio(tuple(parse_formula(term) for term in terms), text, unit)
        tree = parse_formula(items)
        return kinds.Formula(tree, "degree" if tree[0] == "degrees" and not unit else unit, text)


def _with_middle(items: tuple) -> tuple:
    """Return the terms with those for which an item of dots stands, if they grow by the same; else the items."""
    places = [place for place, item in enumerate(items) if item == kinds.Words("...")]
    numbers: list[Any] = [
        item.tree[1] if isinstance(item, kinds.Formula) and item.tree[0] == "number" else None for item in items
    ]
    if len(places) != 1 or not 2 <= places[0] < len(items) - 1 or numbers.count(None) > 1:
        return items
    (place,) = places
    step = numbers[1] - numbers[0]
    count = (numbers[place + 1] - numbers[0]) / step if step else Fraction(0)
    if any(b - a != step for a, b in pairwise(numbers[:place])) or not place <= count <= MOST_LISTED or count % 1:
        return items
    terms = [numbers[0] + step * index for index in range(int(count))]
    return (*(kinds.Formula(("number", term, 0), text=str(term)) for term in terms), *items[place + 1 :])


def _words(items: list[Token]) -> kinds.Formula | kinds.Words | kinds.NamedSet:
    text = " ".join(token.text for token in items)
    text = re.sub(r"^(?:option|choice|answer|the answer is) (?=\S)", "", text, flags=re.IGNORECASE)
    if len(text) == 1 and text.isascii():
        return kinds.Formula(("symbol", text), text=text)
    if text.lower() in NUMBER_WORDS:
        return kinds.Formula(("number", Fraction(NUMBER_WORDS[text.lower()]), 0), text=text)
    meaning = WORD_MEANINGS.get(text.lower(), text.lower())
    names = {"no solution": "O", "all real numbers": "R"}
    return (
        kinds.NamedSet(names[meaning])
        if meaning in names
        else kinds.Words(unit_name(WORD_MEANINGS.get(text.lower(), text)))
    )


def _is_named_point(items: list[Token]) -> bool:
    """Return whether the items are a point with its name, such as A(1,2)."""
    is_name = items[0].kind == "symbol" and items[0].text.isupper()
    return is_name and encloses(items[1:]) and bool(top_level(items[2:-1], (",",)))


def _named_set(items: list[Token]) -> str | None:
    names = [token.text for token in items if token.text not in ("{", "}")]
    if not names:
        return None
    if names[0] == "mathbb" and len(names) > 1 and all(name in "^_+-*0" for name in names[2:]):
        return "".join(names[1:])
    return "O" if names in (["emptyset"], ["varnothing"]) else None


def _with_condition_marked(row: list[Token]) -> list[Token]:
    """Return the row of a function in pieces with & in place of the comma before the condition: 2n, n > 1."""
    commas = top_level(row, (",",))
    if len(commas) != 1 or any(token.text == "&" for token in row):
        return row
    value, condition = row[: commas[0]], row[commas[0] + 1 :]
    is_condition = top_level(condition, RELATIONS) or (condition and condition[0].kind == "word")
    return [*value, Token("sign", "&"), *condition] if is_condition and not top_level(value, RELATIONS) else row


def _without_alignment(row: list[Token]) -> list[Token]:
    """Return a row of cases without & before a relation; any other & stands for the word if, unless it is there."""
    result: list[Token] = []
    for place, token in enumerate(row):
        following = row[place + 1] if place + 1 < len(row) else Token("end", "")
        if token.text != "&":
            result.append(token)
        elif following.text not in RELATIONS and following.kind != "word":
            result = [token for token in result if token.text != ","] + [Token("word", "if")]
        elif following.kind == "word":
            result = [token for token in result if token.text != ","]
    return result


def _with_condition_apart(items: list[Token]) -> list[list[Token]]:
    """The item, and apart from it a condition such as (k \\in \\mathbb{Z}) at its end."""
    if items[-1].text == ")":
        depth = 0
        for place in range(len(items) - 1, 0, -1):
            depth += (items[place].text == ")") - (items[place].text == "(")
            if depth == 0:
                inner = items[place + 1 : -1]
                return [items[:place], inner] if top_level(inner, ("in",)) and len(inner) > 2 else [items]
    return [items]
