"""Reads the structure of an answer's text: a list, a tuple, an interval, an equation, a quantity with a unit, a choice.

`readings` returns every structure that the text can mean: 1,234 is one number or two numbers.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import groupby, pairwise, product
from typing import Any

from verl.utils.math_answers import kinds
from verl.utils.math_answers.formula import constant, parse_formula
from verl.utils.math_answers.kinds import BOUND, INTEGER, RELATIONS, SET_OPERATORS
from verl.utils.math_answers.latex_spelling import NUMBER_WORDS
from verl.utils.math_answers.quantities import compound, is_unit, quantities, unit_name, with_units_as_words
from verl.utils.math_answers.tokens import (
    Token,
    Unreadable,
    cleaned,
    joined_thousands,
    name_of,
    split,
    tokens,
    top_level,
    with_texts,
    without_braces,
)
from verl.utils.math_answers.words import TELLING, UNITS, WORD_MEANINGS

MAX_SIGNS = 4
MAX_LISTED = 200
_SEPARATORS = (",", ";", "quad", "or", "\\\\")
_OPPOSITE = {"+": "-", "-": "+", "<": ">", "<=": ">=", ">": "<", ">=": "<="}
_SET = "\\{\\}"
_CHOICE = re.compile(
    r"(?:\\(?:text|textbf|mathrm|mathbf|textrm|bf)\s*\{\s*)?"
    r"(?:\(\s*([A-Fa-f])\s*\)|([A-F]|[a-f](?=[.)]\s))\s*(?=[.:)]))\s*[.:)]?(?:\s|\\ |~)*\}?"
)
_AFTER_LABEL = re.compile(r"[A-Z]\s*=")
_AFTER_PARENTHESES = re.compile(r"\\(?:cdot|times|cup|cap|in|le|ge|leq|geq|to|pm)(?![a-z])|[A-Z]\s*=|\([^,]*\)$")
_LETTERS_OF_SETS = frozenset("R Z N Q C Z+ N* N+ N^* N^+ Z^+".split())


def readings(answer: str) -> list[kinds.Listing]:
    """Return every structure that an answer's text can mean; raise Unreadable if there is none."""
    text = cleaned(answer)
    label = _CHOICE.match(text)
    if label and _is_choice(text[label.end() :], label[0]):
        letter = (label[1] or label[2]).upper()
        contents = readings(text[label.end() :])
        return [replace(content, label=letter) for content in contents if not content.label]
    texts = [joined_thousands(text)]
    if not re.search(r"\d,0", text) and texts[0] != text:
        texts.append(text)
    results: list[kinds.Listing] = []
    problem = Unreadable("nothing")
    for spelled in texts:
        for independent in (False, True) if len(re.findall(r"\\pm|\\mp", spelled)) > 1 else (False,):
            try:
                items = tokens(spelled)
                results.append(_StructureReader(independent).listing(items))
                if parameter := _parameter(items):
                    items = with_texts(items, {parameter: INTEGER})
                    results.append(_StructureReader(independent).listing(items))
            except Unreadable as error:
                problem = error
    if not results:
        raise problem
    return results


def _parameter(items: Any) -> str:
    """Return the symbol that a condition places in Z; empty if there is none."""
    for place, token in enumerate(items):
        behind = [following.text for following in items[place + 4 : place + 5]]
        if token.kind == "symbol" and name_of(items[place + 1 : place + 4]) == "in mathbb Z":
            if behind not in (["^"], ["_"]):
                return token.text
        if name := _parameter(token.inner):
            return name
    return ""


def _is_choice(rest: str, label: str) -> bool:
    """Return whether the text after a label is separate, not the rest of one formula as in (a)+b or A:B=2:1."""
    if not rest.strip("} ") or rest[0] in "+*/^_=!<>,;:'|)" or (rest[0] == "-" and label.strip()[-1] not in ".:"):
        return False
    is_apart = label[-1] in " .:)~}" or rest[0] == "("
    return is_apart and not (_AFTER_PARENTHESES if label.endswith(")") else _AFTER_LABEL).match(rest)


class _StructureReader:
    """A reader of structures that takes several signs ± in an item as the same sign, or as independent signs."""

    def __init__(self, independent: bool):
        self.independent = independent

    def listing(self, items: list[Token]) -> kinds.Listing:
        """Read items with separators between them."""
        parts, signs = split(without_braces(items), _SEPARATORS)
        results: list[Any] = []
        for part in filter(None, parts):
            for piece in _with_condition_apart(part):
                for spelled in self._signed(piece):
                    results.extend(self._items(spelled))
        if not results:
            raise Unreadable("nothing")
        if any(getattr(item, "unit", "") in ("h", "min") for item in results):
            results = compound(results)
        return kinds.Listing(_with_middle(tuple(results)), "or" in signs)

    def _signed(self, items: list[Token]) -> Iterator[list[Token]]:
        """Yield the item with each sign of ±; signs in the braces of a set belong to the set's elements."""
        names = [token.text for token in _walk(items, _SET) if re.fullmatch(r"(?:pm|mp) \d+", token.text)]
        if len(names) > MAX_SIGNS:
            raise Unreadable("too many signs")
        choices: Any = product("+-", repeat=len(names))
        if not self.independent or any(name.startswith("mp") for name in names):
            choices = {"+" * len(names), "-" * len(names)}
        for choice in sorted(choices):
            signs = zip(names, choice, strict=True)
            yield with_texts(items, {name: sign if name[0] == "p" else _OPPOSITE[sign] for name, sign in signs})

    def _items(self, items: list[Token]) -> list[Any]:
        """Return the structure of an item; for cases, the structure of each row."""
        if len(items) == 1 and items[0].kind == "group" and items[0].text in ("cases", "aligned", "array"):
            rows, _ = split(list(items[0].inner), ("\\\\",))
            cells = [_row(row) for row in rows if row]
            if items[0].text != "array" or all(top_level(row, RELATIONS) for row in cells):
                return [item for row in cells for item in self.listing(row).items]
        structure = self.item(items)
        return quantities(structure) if isinstance(structure, kinds.Phrase) else [structure]

    def item(self, items: list[Token]) -> Any:
        """Read an item that is no list: a chain of relations, or a value."""
        sides, relations = split(items, RELATIONS)
        if not relations:
            return self.value(sides[0])
        if ">" in relations or ">=" in relations:  # x > 3 is 3 < x
            sides, relations = sides[::-1], [_OPPOSITE.get(relation, relation) for relation in relations[::-1]]
        values = []
        for side in sides:
            rows = self._items(side)
            values.append(rows[0] if len(rows) == 1 else kinds.Listing(tuple(rows)))
        if relations[-1] in ("in", "notin") and isinstance(values[-1], kinds.Formula):
            name = values[-1].text.removesuffix("inbold")
            values[-1] = kinds.NamedSet(name) if name in _LETTERS_OF_SETS else values[-1]
        if relations == ["equiv"]:
            values[-1] = _least_residue(values[-1])
        return kinds.Chain(tuple(values), tuple(relations))

    def value(self, items: list[Token]) -> Any:
        """Read the side of a relation, or an item without relations."""
        items = without_braces(items)
        if not items:
            raise Unreadable("nothing")
        if len(items) == 1 and items[0].text == "dots":
            return kinds.Words("...")
        is_named = len(items) == 2 and items[0].kind == "symbol" and items[0].text.isupper()
        if is_named and top_level(list(items[1].inner), (",",)):  # the point A(1, 2)
            return kinds.Chain((kinds.symbol(items[0].text), self._bracketed(items[1:])), ("=",))
        sides, operators = split(items, SET_OPERATORS)
        if operators:
            return kinds.Chain(tuple(map(self.value, sides)), tuple(operators))
        name = name_of(items)
        if name in ("emptyset", "varnothing", "\\{ \\}"):
            return kinds.NamedSet("O")
        if re.fullmatch(r"mathbb [A-Z]+[ ^_+*0-]*", name):
            return kinds.NamedSet(name.removeprefix("mathbb").replace(" ", ""))
        bracketed = self._bracketed(items)
        return self._quantity(items) if bracketed is None else bracketed

    def _bracketed(self, items: list[Token]) -> Any:
        inner = list(items[0].inner)
        brackets = items[0].text.replace("langlerangle", "()")
        if brackets == items[-1].text == "[":
            brackets, inner = "[[", items[1:-1]
        elif len(items) > 1 or not inner:
            return None
        if brackets == _SET:
            return self._set(inner)
        if len(top_level(inner, (",", ";"))) == 1:
            brackets = {"][": "()", "]]": "(]", "[[": "[)"}.get(brackets, brackets)
        if brackets not in ("()", "(]", "[)", "[]"):
            return None
        content = self.listing(inner)
        if len(content.items) == 1:
            return content.items[0] if brackets != "[)" else None
        return kinds.Bracketed(brackets, content.items)

    def _set(self, inner: list[Token]) -> Any:
        bars = top_level(inner, ("|",))
        colons = top_level(inner, (":",))
        place = bars[0] if len(bars) % 2 and bars[0] > 0 else colons[0] if colons and not bars else None
        if place is None or not top_level(inner[place + 1 :], RELATIONS):
            return kinds.Bracketed("{}", self.listing(inner).items)
        head, rest = inner[:place], inner[place + 1 :]
        has_domain = len(head) > 1 and head[1].text == "in"
        if head[0].kind == "symbol" and (len(head) == 1 or has_domain):
            rest = [*head, Token("sign", ","), *rest] if has_domain else rest
            rest = with_texts(rest, {head[0].text: BOUND})
            head = [Token("symbol", BOUND)]
        return kinds.Builder(self.value(head), self.listing(rest))

    def _quantity(self, items: list[Token]) -> Any:
        """Read a formula, words, or both."""
        items = with_units_as_words(items)
        if all(token.kind == "word" for token in items):
            return _words(" ".join(token.text for token in items))
        currency = next((token.text for token in items if token.text in ("$", "€", "£", "¥")), "")
        items = [token for token in items if token.text != currency or token.kind != "sign"]
        words = [token.text for token in _walk(items) if token.kind == "word"]
        if not items:
            raise Unreadable("a currency without an amount")
        if not words:
            return self._ratio_or_formula(items, UNITS.get(currency, ""))
        start = next((place for place, token in enumerate(items) if token.kind == "word"), 0)
        if start > 0 and items[start - 1].text not in ("+", "-", "*", "times", "/", "^") and is_unit(items[start:]):
            return self._ratio_or_formula(items[:start], unit_name(name_of(items[start:])))
        if all(len(word) < 3 and word.lower() not in TELLING for word in words):
            try:
                return kinds.Formula(parse_formula(items), text=name_of(items).replace(" ", ""))
            except Unreadable:
                pass  # Then the words are a phrase.
        return self._phrase(items)

    def _phrase(self, items: list[Token]) -> kinds.Phrase:
        runs = [list(run) for _, run in groupby(items, lambda token: token.kind == "word")]
        if len(runs) < 2:
            raise Unreadable("words in a formula")
        parts = (kinds.Words(unit_name(name_of(run))) if run[0].kind == "word" else self._part(run) for run in runs)
        return kinds.Phrase(tuple(parts))

    def _part(self, run: list[Token]) -> Any:
        try:
            return self.item(run)
        except Unreadable:
            return kinds.Words(name_of(run))

    def _ratio_or_formula(self, items: list[Token], unit: str) -> Any:
        text = name_of(items).replace(" ", "")
        if items[-1].text == "%":
            items, unit = items[:-1], "%"
        terms, colons = split(items, (":",))
        tree = ("ratio", *map(parse_formula, terms)) if colons else parse_formula(items)
        return kinds.Formula(tree, "degree" if tree[0] == "degrees" and not unit else unit, text)


def _walk(items: Any, excluded: str = "") -> Iterator[Token]:
    """Yield the tokens and the tokens in groups, except in groups with `excluded` brackets."""
    for token in items:
        yield token
        if token.text != excluded:
            yield from _walk(token.inner, excluded)


def _with_middle(items: tuple) -> tuple:
    """Return the terms with dots replaced by the omitted terms if the steps between terms are equal; else the items."""
    if kinds.Words("...") not in items:
        return items
    place = items.index(kinds.Words("..."))
    terms: list[Any] = [getattr(item, "tree", ("",)) for item in (*items[:place], *items[place + 1 : place + 2])]
    if place < 2 or len(terms) == place or any(tree[0] != "number" for tree in terms):
        return items
    first, second, *_, last = (tree[1] for tree in terms)
    step = second - first
    count = (last - first) / step if step else Fraction(0)
    middle = [first + step * index for index in range(int(min(count, MAX_LISTED)))]
    if [tree[1] for tree in terms[:-1]] != middle[:place] or len(middle) != count:
        return items
    return (*(kinds.Formula(constant(term), text=str(term)) for term in middle), *items[place + 1 :])


def _words(text: str) -> kinds.Formula | kinds.Words | kinds.NamedSet:
    text = re.sub(r"^(?:option|choice|answer|the answer is) (?=\S)", "", text, flags=re.IGNORECASE)
    if len(text) == 1 and text.isascii():
        return kinds.symbol(text)
    if text.lower() in NUMBER_WORDS:
        return kinds.Formula(constant(NUMBER_WORDS[text.lower()]), text=text)
    meaning = WORD_MEANINGS.get(text.lower(), text)
    names = {"no solution": "O", "all real numbers": "R"}
    return kinds.NamedSet(names[meaning.lower()]) if meaning.lower() in names else kinds.Words(unit_name(meaning))


def _least_residue(congruent: Any) -> Any:
    """Return 10 mod 7 as 3 mod 7."""
    match congruent:
        case kinds.Phrase(parts=(kinds.Formula(tree=residue), kinds.Words("mod"), kinds.Formula(tree=modulus) as last)):
            if residue[0] == modulus[0] == "number" and modulus[1]:
                return kinds.Phrase((kinds.Formula(constant(residue[1] % modulus[1])), kinds.Words("mod"), last))
    return congruent


def _row(row: list[Token]) -> list[Token]:
    """Return a row of cases without alignment signs, and with the word if before a condition that lacks it."""
    row = [
        token
        for token, behind in pairwise([*row, Token("end", "")])
        if token.text != "&" or behind.text not in RELATIONS
    ]
    cells, _ = split(row, ("&",))
    if len(cells) == 1:
        cells, _ = split(row, (",",))
        is_condition = cells[-1] and (top_level(cells[-1], RELATIONS) or cells[-1][0].kind == "word")
        if len(cells) != 2 or top_level(cells[0], RELATIONS) or not is_condition:
            return row
    value = [token for cell in cells[:-1] for token in cell if token.text != ","]
    return [*value, *([] if cells[-1][:1] and cells[-1][0].kind == "word" else [Token("word", "if")]), *cells[-1]]


def _with_condition_apart(items: list[Token]) -> list[list[Token]]:
    """Return the item and, if it ends with a condition such as (k \\in \\mathbb{Z}), the condition separately."""
    inner = list(items[-1].inner)
    is_condition = items[-1].text == "()" and len(items) > 1 and top_level(inner, ("in",)) and len(inner) > 2
    return [items[:-1], inner] if is_condition else [items]
