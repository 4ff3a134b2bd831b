"""Parses the tokens of a formula into a tree, by recursive descent; what it does not know raises Unreadable.

A tree is a tuple of a kind and its operands: ("number", value, digits), ("symbol", name), ("constant", name),
("add" | "multiply" | "divide" | "power", left, right), ("negative" | "factorial" | "degrees", operand),
("function", name, operand, ...), ("unknown", name, operand, ...) for f(x), ("sum" | "product" | "integral", variable,
from, to, body), ("derivative", variable, body), ("matrix", rows), ("mixed", whole, fraction).
"""

from fractions import Fraction

from verl.utils.reward_score.answer_operators import (
    beside,
    is_number,
    multiplied,
    read_fraction,
    read_integral,
    read_matrix,
    read_root,
    read_series,
)
from verl.utils.reward_score.answer_tokens import Token, Unreadable
from verl.utils.reward_score.answer_words import BINOMIALS, DECORATIONS, FRACTIONS, FUNCTIONS

MAX_DEPTH = 60
_ALIASES = {"asin": "arcsin", "acos": "arccos", "atan": "arctan", "lg": "log10"}
_CLOSING = {"(": ")", "[": "]", "{": "}", "langle": "rangle"}
_IN_EVENTS = frozenset("= < <= > >= != cup cap".split())
_STARTS = frozenset("( { [".split())
_ALWAYS_FUNCTIONS = frozenset("fF")
_OFTEN_FUNCTIONS = frozenset("ghpquvyPQWGH")
END = Token("end", "")


def parse_formula(tokens: list[Token]) -> tuple:
    """Parse all tokens as one formula.

    Raises:
        Unreadable: they are not one.
    """
    return FormulaReader(tokens).whole()


def name_of(tokens: list[Token]) -> str:
    """Return the tokens' texts as a name, such as that of a subscript; braces only group."""
    return " ".join(token.text for token in tokens if token.text not in "{}")


class FormulaReader:
    """A reader of tokens from left to right; each method consumes what it returns the tree of."""

    def __init__(self, tokens: list[Token]):
        self.tokens = tokens
        self.place = 0
        self.depth = 0
        self.bars = 0  # how many |...| are open

    def whole(self) -> tuple:
        """Read all tokens as one formula."""
        tree = self.sum()
        if self.next is not END:
            raise Unreadable(f"{self.next.text!r} has no place in the formula")
        return tree

    def parsed(self, tokens: list[Token]) -> tuple:
        """Read other tokens, which are deeper in the formula."""
        reader = FormulaReader(tokens)
        reader.depth = self.depth
        return reader.whole()

    def inside(self, tokens: list[Token]) -> tuple:
        """Read the tokens of an argument, in braces or not."""
        is_group = len(tokens) > 1 and tokens[0].text == "{" and tokens[-1].text == "}"
        return self.parsed(tokens[1:-1] if is_group else tokens)

    @property
    def next(self) -> Token:
        return self.tokens[self.place] if self.place < len(self.tokens) else END

    def take(self) -> Token:
        token = self.next
        self.place += 1
        return token

    def accept(self, *texts: str) -> str | None:
        """Consume the next token if it is one of these signs or commands."""
        if self.next.kind in ("sign", "command") and self.next.text in texts:
            return self.take().text
        return None

    def expect(self, text: str) -> None:
        if not self.accept(text):
            raise Unreadable(f"{text!r} is missing before {self.next.text!r}")

    def sum(self) -> tuple:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unreadable("nested too deep")
        negative = self._sign()
        tree = self.product()
        tree = ("negative", tree) if negative else tree
        while self.next.kind == "sign" and self.next.text in ("+", "-"):
            negative = self._sign()
            term = self.product()
            tree = ("add", tree, ("negative", term) if negative else term)
        self.depth -= 1
        return tree

    def _sign(self) -> bool:
        negative = False
        while sign := self.accept("+", "-"):
            negative ^= sign == "-"
        return negative

    def product(self) -> tuple:
        tree = self._factor_with_sign()
        while True:
            if sign := self.accept("*", "times"):
                tree = multiplied(tree, self._factor_with_sign(), sign)
            elif sign := self.accept("/", "div"):
                tree = ("divide", tree, self._denominator(tree, sign))
            elif self.accept("over"):
                tree = ("divide", tree, self.product())
            elif self._starts_factor():
                tree = beside(tree, self._fraction_of_digits() if self.next.kind == "number" else self.factor())
            else:
                return tree

    def _fraction_of_digits(self) -> tuple:
        """Read the fraction of a mixed number such as 3 1/2; two numbers beside each other are nothing else."""
        above, slash, below = [*self.tokens[self.place : self.place + 3], END, END][:3]
        before = self.tokens[self.place - 1]
        if before.text == "!":  # 5!5!
            return self.factor()
        if not (before.kind == below.kind == "number" and above.spaced and slash.text == "/" and below.text.isdigit()):
            raise Unreadable("two numbers beside each other")
        self.place += 3
        return ("divide", ("number", Fraction(above.text), 0), ("number", Fraction(below.text), 0))

    def _factor_with_sign(self) -> tuple:
        negative = self._sign()
        tree = self.factor()
        return ("negative", tree) if negative else tree

    def _denominator(self, numerator: tuple, sign: str) -> tuple:
        """Read what a slash divides by: 1/2 x is x/2, as 1/2 is a number, but E/2R divides by 2R."""
        tree = self._factor_with_sign()
        if sign == "div" or (is_number(numerator) and is_number(tree)):
            return tree
        while self.next.kind in ("symbol", "command") and not self.next.spaced and self._starts_factor():
            tree = ("multiply", tree, self.factor())
        return tree

    def _starts_factor(self) -> bool:
        token = self.next
        if token.kind in ("number", "symbol", "word", "command"):
            return not token.text.startswith("end ") and token.text not in ("rfloor", "rceil")
        return token.kind == "sign" and (token.text in _STARTS or (token.text == "|" and self.bars == 0))

    def factor(self) -> tuple:
        tree = self.operand()
        while True:
            if self.accept("^"):
                tree = self._power(tree)
            elif self.accept("!"):
                tree = ("factorial", tree)
            elif self.accept("deg"):
                tree = ("degrees", tree)
            else:
                return tree

    def _power(self, base: tuple) -> tuple:
        end = self._end_of_argument(self.place)
        name = name_of(self.tokens[self.place : end])
        if name in ("deg", "'") or (base[0] == "matrix" and name in ("T", "top", "t")):
            self.place = end
            if name == "'":
                return ("symbol", f"{base[1]}'")
            return ("degrees", base) if name == "deg" else ("function", "transpose", base)
        return ("power", base, self._exponent())

    def _exponent(self) -> tuple:
        if self.next.text == "{":
            return self.group()
        negative = self._sign()
        tree = self.operand()
        return ("negative", tree) if negative else tree

    def _end_of_argument(self, start: int) -> int:
        """Return the place behind a group in brackets, or behind the token or the signed token that is an argument."""
        token = self.tokens[start] if start < len(self.tokens) else END
        if token.kind == "sign" and token.text in ("{", "("):
            return self._closing(start) + 1
        return start + (2 if token.text in ("+", "-") else 1)

    def _closing(self, start: int) -> int:
        """Return the place of the sign that closes the bracket at a place."""
        opening = self.tokens[start].text
        depth = 0
        for place in range(start, len(self.tokens)):
            token = self.tokens[place]
            if token.kind == "sign":
                depth += (token.text == opening) - (token.text == _CLOSING[opening])
                if depth == 0:
                    return place
        raise Unreadable(f"{opening!r} is not closed")

    def group(self) -> tuple:
        """Read a formula in braces, or a single digit, symbol or command as an argument."""
        if self.accept("{"):
            tree = self.sum()
            self.expect("}")
            return tree
        token = self.next
        if token.kind == "number" and token.text.isdigit() and len(token.text) > 1:  # \frac12
            self.tokens = [*self.tokens[: self.place], Token("number", token.text[0]),
                           Token("number", token.text[1:]), *self.tokens[self.place + 1 :]]  # fmt: skip
        return self.operand()

    def operand(self) -> tuple:
        token = self.take()
        if token.kind == "number":
            whole, _, decimals = token.text.partition(".")
            digits = len((whole + decimals).lstrip("0")) if decimals.strip("0") else 0
            return ("number", Fraction(token.text if whole else f"0{token.text}"), digits)
        if token.kind in ("symbol", "word"):
            return self._symbol(token)
        if token.kind == "command":
            return self._command(token.text)
        if token.text in ("(", "[", "{") and token.kind == "sign":
            return self.in_brackets(token.text)
        if token.text == "|" and token.kind == "sign":
            self.bars += 1
            tree = self.sum()
            self.expect("|")
            self.bars -= 1
            return ("function", "det" if tree[0] == "matrix" else "abs", tree)
        raise Unreadable(f"{token.text!r} has no place in the formula")

    def in_brackets(self, opening: str) -> tuple:
        bars, self.bars = self.bars, 0
        tree = self.sum()
        self.expect(_CLOSING[opening])
        self.bars = bars
        return tree

    def _symbol(self, token: Token) -> tuple:
        name = token.text
        if self.accept("_"):
            name += "_" + self._name_argument()
        if name.startswith("C_") and self.next.text == "^" and name[2:].isdigit():
            self.take()
            return ("function", "binomial", ("number", Fraction(name[2:]), 0), self.group())
        while self.accept("'"):
            name += "'"
        if content := self._event():
            return ("symbol", f"{name}({content})")
        if self._is_applied(name):
            self.expect("(")
            arguments = [self.sum()]
            while self.accept(","):
                arguments.append(self.sum())
            self.expect(")")
            return ("unknown", name, *arguments)
        if token.kind == "symbol" and name in ("e", "i"):
            return ("constant", name)
        return ("symbol", name)

    def _event(self) -> str:
        """Read the text in parentheses if it is no formula, as in P(A|B) or P(X=2); else nothing."""
        if self.next.kind != "sign" or self.next.text != "(":
            return ""
        end = self._closing(self.place)
        content = self.tokens[self.place + 1 : end]
        bars = sum(token.text == "|" for token in content)
        if bars % 2 == 0 and not any(token.kind == "sign" and token.text in _IN_EVENTS for token in content):
            return ""
        self.place = end + 1
        return name_of(content)

    def _is_applied(self, name: str) -> bool:
        """Return whether a symbol before a parenthesis is a function, not a factor."""
        if self.next.kind != "sign" or self.next.text != "(":
            return False
        content = self.tokens[self.place + 1 : self._closing(self.place)]
        is_simple = len(content) == 1 and content[0].kind in ("number", "symbol")
        return name[0] in _ALWAYS_FUNCTIONS or (is_simple and name[0] in _OFTEN_FUNCTIONS)

    def _name_argument(self) -> str:
        """Read the text of a subscript, or of what an accent is above."""
        if self.next.text == "{" and self.next.kind == "sign":
            start, end = self.place, self._closing(self.place)
            self.place = end + 1
            return name_of(self.tokens[start:end])
        return self.take().text

    def _command(self, name: str) -> tuple:
        if name in FRACTIONS:
            return read_fraction(self)
        if name in BINOMIALS:
            return ("function", "binomial", self.group(), self.group())
        if name in DECORATIONS:
            return ("symbol", f"{self._name_argument()} {DECORATIONS[name]}")
        if name in ("angle", "triangle", "odot", "arc"):
            letters = ""
            while self.next.kind == "symbol" and self.next.text.isupper():
                letters += self.take().text
            return ("symbol", f"{name} {letters or self.take().text}")
        if name == "sqrt":
            return read_root(self)
        if name in FUNCTIONS:
            return self._function(name)
        if name in ("pi", "infty"):
            return ("constant", name)
        if name == "scientific":
            self.expect("{")
            mantissa = self.operand()
            exponent = self._rest_of_braces() + self._braces()
            return ("number", mantissa[1] * Fraction(10) ** int(exponent), mantissa[2])
        if name == "inbase":
            return ("symbol", f"{self._braces()} in base {self._braces()}")
        if name in ("lfloor", "lceil"):
            tree = self.sum()
            self.expect("rfloor" if name == "lfloor" else "rceil")
            return ("function", name[1:], tree)
        if name in ("sum", "prod"):
            return read_series(self, name)
        if name == "int":
            return read_integral(self)
        if name.startswith("begin "):
            return read_matrix(self, name.removeprefix("begin "))
        raise Unreadable(f"command {name!r}")

    def _braces(self) -> str:
        self.expect("{")
        return self._rest_of_braces()

    def _rest_of_braces(self) -> str:
        text = ""
        while not self.accept("}"):
            if self.next is END:
                raise Unreadable("a brace is not closed")
            text += self.take().text
        return text

    def _function(self, name: str) -> tuple:
        name = _ALIASES.get(name, name)
        exponent: tuple | None = None
        base: list[tuple] = []
        while True:
            if name == "log" and self.accept("_"):
                base = [self.operand() if self.next.kind == "number" else self.group()]
            elif self.accept("^"):
                exponent = self._exponent()
            else:
                break
        operands = self._function_operands() + base
        if exponent == ("negative", ("number", Fraction(1), 0)) and name in ("sin", "cos", "tan"):
            return ("function", f"arc{name}", *operands)
        tree = ("function", name, *operands)
        return ("power", tree, exponent) if exponent else tree

    def taken_argument(self) -> list[Token]:
        start, self.place = self.place, self._end_of_argument(self.place)
        return self.tokens[start : self.place]

    def _function_operands(self) -> list[tuple]:
        """Read the operands in parentheses, or else the product before the next function or parenthesis."""
        for opening in ("(", "{", "["):
            if self.accept(opening):
                operands = [self.sum()]
                while self.accept(","):
                    operands.append(self.sum())
                self.expect(_CLOSING[opening])
                return operands
        negative = self._sign()
        tree = self.factor()
        while self._starts_factor() and not (
            self.next.text in FUNCTIONS - {"sqrt"} or self.next.text == "(" or self.next.kind == "number"
        ):
            tree = beside(tree, self.factor())
        return [("negative", tree) if negative else tree]
