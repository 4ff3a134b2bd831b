"""Parses the tokens of a formula into a tree by recursive descent, and raises Unreadable for unknown notations.

A tree is a tuple of a kind and its operands: ("number", value, digits), ("symbol", name), ("constant", name),
("add" | "multiply" | "divide" | "power", left, right), ("negative" | "factorial" | "degrees", operand),
("function", name, operand, ...), ("unknown", name, operand, ...) for f(x), ("sum" | "product" | "integral", variable,
from, to, body), ("limit", variable, place, body), ("derivative", variable, body), ("matrix", ("row",
cell, ...), ...); `structure.py` reads ("ratio", term, term, ...).
"""

from collections.abc import Callable, Sequence
from fractions import Fraction

from verl.utils.math_answers.tokens import Token, Unreadable, name_of, split, top_level
from verl.utils.math_answers.words import BINOMIALS, DECORATIONS, FRACTIONS, FUNCTIONS, MATRICES

MAX_BARS = 20
_ALIASES = {"asin": "arcsin", "acos": "arccos", "atan": "arctan", "lg": "log10"}
_BRACKETS = ("()", "[]", "{}")
_IN_EVENTS = tuple("= < <= > >= != cup cap".split())
_ALWAYS_FUNCTIONS = frozenset("fF")
_OFTEN_FUNCTIONS = frozenset("ghpquvyPQWGH")
_NEXT_OPERANDS = FUNCTIONS - {"sqrt"} | {"()"}
_END = Token("end", "")


def parse_formula(tokens: Sequence[Token]) -> tuple:
    """Return the tree of a formula; raise Unreadable if the tokens are not one formula."""
    reader = _FormulaReader(list(tokens))
    tree = reader.sum()
    if reader.next is not _END:
        raise Unreadable(f"{reader.next.text!r} has no place in the formula")
    return tree


def constant(value: int | Fraction) -> tuple:
    """Return the formula of an exact number."""
    return ("number", Fraction(value), 0)


class _FormulaReader:
    """A reader of tokens from left to right; each method consumes the tokens whose tree it returns."""

    def __init__(self, tokens: list[Token]):
        self.tokens = tokens
        self.place = 0
        self.bars = 0  # the number of open |

    @property
    def next(self) -> Token:
        return self.tokens[self.place] if self.place < len(self.tokens) else _END

    def take(self) -> Token:
        token = self.next
        self.place += 1
        return token

    def accept(self, *texts: str) -> str | None:
        """Consume the next token if it is one of these signs, commands or groups."""
        return self.take().text if self.next.kind != "word" and self.next.text in texts else None

    def sum(self) -> tuple:
        tree = self._signed(self._product)
        while self.next.kind == "sign" and self.next.text in ("+", "-"):
            tree = ("add", tree, self._signed(self._product))
        return tree

    def _signed(self, read: Callable[[], tuple]) -> tuple:
        negative = False
        while sign := self.accept("+", "-"):
            negative ^= sign == "-"
        return _negated(read()) if negative else read()

    def _product(self) -> tuple:
        tree = self._signed(self._factor)
        while True:
            if sign := self.accept("*", "times"):
                tree = _multiplied(tree, self._signed(self._factor), sign)
            elif sign := self.accept("/", "div"):
                tree = ("divide", tree, self._denominator(tree, sign))
            elif self.accept("over"):
                tree = ("divide", tree, self._product())
            elif self._starts_factor():
                tree = _beside(tree, self._fraction_of_digits() if self.next.kind == "number" else self._factor())
            else:
                return tree

    def _fraction_of_digits(self) -> tuple:
        """Read the fraction of a mixed number such as 3 1/2; two numbers beside each other mean nothing else."""
        before, above, slash, below = [*self.tokens[self.place - 1 : self.place + 3], _END, _END][:4]
        if before.text == "!":  # 5!5!
            return self._factor()
        if not (before.kind == below.kind == "number" and above.spaced and slash.text == "/" and below.text.isdigit()):
            raise Unreadable("two numbers beside each other")
        self.place += 3
        return ("divide", constant(Fraction(above.text)), constant(int(below.text)))

    def _denominator(self, numerator: tuple, sign: str) -> tuple:
        """Read the denominator after a slash: 1/2 x is x/2, as 1/2 is a number, but E/2R divides by 2R."""
        tree = self._signed(self._factor)
        if sign == "div" or numerator[0] == tree[0] == "number":
            return tree
        while self.next.kind in ("symbol", "command") and not self.next.spaced:
            tree = ("multiply", tree, self._factor())
        return tree

    def _starts_factor(self) -> bool:
        token = self.next
        is_bar = token.text == "|" and self.bars == 0
        return token.kind in ("number", "symbol", "word", "command", "group") or (token.kind == "sign" and is_bar)

    def _factor(self) -> tuple:
        tree = self._operand()
        while sign := self.accept("^", "!", "deg"):
            if sign == "^":
                tree = self._power(tree)
            else:
                tree = ("factorial" if sign == "!" else "degrees", tree)
        return tree

    def _power(self, base: tuple) -> tuple:
        name = name_of([self.next])
        if name == "'":
            self.take()
            return ("symbol", f"{base[1]}'")
        if name == "deg" or (base[0] == "matrix" and name in ("T", "top", "t")):
            self.take()
            return ("degrees", base) if name == "deg" else ("function", "transpose", base)
        return ("power", base, self._signed(self._operand))

    def _argument(self) -> tuple:
        token = self.next
        if token.kind == "number" and token.text.isdigit() and len(token.text) > 1:  # \frac12
            digits = [Token("number", token.text[0]), Token("number", token.text[1:])]
            self.tokens[self.place : self.place + 1] = digits
        return self._operand()

    def _operand(self) -> tuple:
        token = self.take()
        if token.kind == "number":
            whole, _, decimals = token.text.partition(".")
            digits = len((whole + decimals).lstrip("0")) if decimals.strip("0") else 0
            return ("number", Fraction(token.text if whole else f"0{token.text}"), digits)
        if token.kind in ("symbol", "word"):
            return self._symbol(token)
        if token.kind == "command":
            return self._command(token.text)
        if token.kind == "group":
            return self._group(token)
        if token.text == "|" and self.bars < MAX_BARS:
            self.bars += 1
            tree = self.sum()
            self.bars -= 1
            if self.accept("|"):
                return ("function", "det" if tree[0] == "matrix" else "abs", tree)
        raise Unreadable(f"{token.text!r} has no place in the formula")

    def _group(self, token: Token) -> tuple:
        if token.text in _BRACKETS:
            return parse_formula(token.inner)
        if token.text in ("lfloorrfloor", "lceilrceil"):
            return ("function", "floor" if "floor" in token.text else "ceil", parse_formula(token.inner))
        if token.text not in MATRICES:
            raise Unreadable(f"brackets or environment {token.text!r}")
        rows = [split(row, ("&",))[0] for row in split(list(token.inner), ("\\\\",))[0] if row]
        if len({len(row) for row in rows}) != 1:
            raise Unreadable("the rows of a matrix have several lengths")
        matrix = ("matrix", *(("row", *map(parse_formula, row)) for row in rows))
        return ("function", "det", matrix) if token.text == "vmatrix" else matrix

    def _symbol(self, token: Token) -> tuple:
        name = token.text
        if self.accept("_"):
            name += "_" + name_of([self.take()])
        if name.startswith("C_") and name[2:].isdigit() and self.accept("^"):
            return ("function", "binomial", constant(int(name[2:])), self._argument())
        while self.accept("'"):
            name += "'"
        if self.next.text == "()":
            content = list(self.next.inner)
            if len(top_level(content, ("|",))) % 2 or top_level(content, _IN_EVENTS):  # P(A|B), P(X=2)
                return ("symbol", f"{name}({name_of(self.take().inner)})")
            is_simple = len(content) == 1 and content[0].kind in ("number", "symbol")
            if name[0] in _ALWAYS_FUNCTIONS or (is_simple and name[0] in _OFTEN_FUNCTIONS):
                return ("unknown", name, *self._operands_in_brackets())
        return ("constant" if token.kind == "symbol" and name in ("e", "i") else "symbol", name)

    def _operands_in_brackets(self) -> list[tuple]:
        return [parse_formula(operand) for operand in split(list(self.take().inner), (",",))[0]]

    def _command(self, name: str) -> tuple:
        if name in FRACTIONS:
            return self._fraction()
        if name in BINOMIALS:
            return ("function", "binomial", self._argument(), self._argument())
        if name in DECORATIONS:
            return ("symbol", f"{name_of([self.take()])} {DECORATIONS[name]}")
        if name in ("angle", "triangle", "odot", "arc"):
            letters = ""
            while self.next.kind == "symbol" and self.next.text.isupper():
                letters += self.take().text
            return ("symbol", f"{name} {letters or name_of([self.take()])}")
        if name == "sqrt":
            degree = parse_formula(self.take().inner) if self.next.text == "[]" else constant(2)
            return ("function", "root", self._operand() if self.next.kind == "number" else self._argument(), degree)
        if name in FUNCTIONS:
            return self._function(_ALIASES.get(name, name))
        if name in ("pi", "infty"):
            return ("constant", name)
        if name in ("sum", "prod", "int"):
            return self._with_limits(name)
        if name == "lim" and self.accept("_"):
            variable, arrow, *place = [*self.take().inner, _END, _END]
            if variable.kind == "symbol" and arrow.text == "->":
                return ("limit", variable.text, parse_formula(place[:-2]), self._product())
        raise Unreadable(f"command {name!r}")

    def _fraction(self) -> tuple:
        """Read a fraction; d/dx means the derivative of the following formula, and dy/dx the symbol y'."""
        above, below = ([token.text for token in group.inner] for group in [*self.tokens[self.place :], _END, _END][:2])
        if len(below) == 2 and below[0] == "d" and above[:1] == ["d"] and len(above) < 3:
            self.place += 2
            if len(above) == 1:
                return ("derivative", below[1], self._product())
            return ("symbol", f"{above[1]}'" if below[1] == "x" else f"d{above[1]}/d{below[1]}")
        return ("divide", self._argument(), self._argument())

    def _with_limits(self, name: str) -> tuple:
        """Read the limits and the terms of a sum or product, or an integral up to its dx."""
        limits: dict[str, list[Token]] = {}
        while sign := self.accept("_", "^"):
            limits[sign] = [self.take()]
        if len(limits) < 2:
            raise Unreadable("limits are missing")
        below, above = limits["_"], limits["^"]
        if name == "int":
            return self._integral(parse_formula(below), parse_formula(above))
        variable, equals, *start = [*below[0].inner, _END, _END]
        if variable.kind != "symbol" or equals.text != "=":
            raise Unreadable("a sum over something else than a variable")
        kind = {"sum": "sum", "prod": "product"}[name]
        return (kind, variable.text, parse_formula(start[:-2]), parse_formula(above), self._product())

    def _integral(self, start: tuple, end: tuple) -> tuple:
        for place in range(self.place, len(self.tokens) - 1):
            if self.tokens[place].text == "d" and self.tokens[place + 1].kind == "symbol":
                body = self.tokens[self.place : place] or [Token("number", "1")]
                self.place = place + 2
                return ("integral", self.tokens[place + 1].text, start, end, parse_formula(body))
        raise Unreadable("an integral without dx")

    def _function(self, name: str) -> tuple:
        exponent: tuple | None = None
        base: list[tuple] = []
        while sign := self.accept("^", "_"):
            if sign == "^":
                exponent = self._signed(self._operand)
            elif name == "log":
                base = [self._operand() if self.next.kind == "number" else self._argument()]
            else:
                raise Unreadable(f"a subscript of {name}")
        operands = self._function_operands() + base
        if exponent == constant(-1) and name in ("sin", "cos", "tan"):
            return ("function", f"arc{name}", *operands)
        tree = ("function", name, *operands)
        return ("power", tree, exponent) if exponent else tree

    def _function_operands(self) -> list[tuple]:
        """Read the operands in parentheses, or else the product before the next function or parenthesis."""
        if self.next.text in _BRACKETS:
            return self._operands_in_brackets()
        return [self._signed(self._product_without_brackets)]

    def _product_without_brackets(self) -> tuple:
        tree = self._factor()
        while self._starts_factor() and self.next.kind != "number" and self.next.text not in _NEXT_OPERANDS:
            tree = _beside(tree, self._factor())
        return tree


def _negated(tree: tuple) -> tuple:
    return ("number", -tree[1], tree[2]) if tree[0] == "number" else ("negative", tree)


def _beside(left: tuple, right: tuple) -> tuple:
    """Return the product of two factors beside each other, or the mixed number if they are 3 1/2 or 3\\frac{1}{2}."""
    is_fraction = right[0] == "divide" and all(part[0] == "number" and part[1] >= 0 for part in right[1:])
    if left[0] == "number" and left[1].denominator == 1 and left[1] >= 0 and not left[2] and is_fraction:
        return ("add", left, right)
    return _multiplied(left, right, "")


def _multiplied(left: tuple, right: tuple, sign: str) -> tuple:
    """Return the product of two factors; their order counts for cross products and for matrices with bold names."""
    names = [_last_bold_name(factor) for factor in (left, right)]
    if sign == "times" and all(names):
        return ("add", ("unknown", "times", left, right), ("negative", ("unknown", "times", right, left)))
    if all(name.isupper() for name in names):
        return ("unknown", "matrix product", left, right)
    return ("multiply", left, right)


def _last_bold_name(tree: tuple) -> str:
    """Return the name of a vector or matrix in a formula, without its bold mark; empty if there is none."""
    if tree[0] == "symbol":
        return tree[1].removesuffix(" in bold") if tree[1].endswith(" in bold") else ""
    names = [_last_bold_name(part) for part in tree[1:] if isinstance(part, tuple)]
    return next((name for name in reversed(names) if name), "")
