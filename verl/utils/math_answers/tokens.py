"""Splits the LaTeX or plain text of an answer into tokens: numbers, letters, words, commands, signs and groups.

Layout (sizes, spaces, colors, dollars around formulas) leaves no token. A run of letters is a word, the name of a
function, or a product of letters. A group is the content of brackets or of an environment.
"""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from verl.utils.math_answers.latex_spelling import common_spelling, plain_characters, without_repeating_decimals
from verl.utils.math_answers.words import (
    CONSTANTS,
    FUNCTIONS,
    GREEK,
    SHORT_UNITS,
    SIGNS,
    SPACED_UNITS,
    UNIT_SYMBOLS,
    WORDS,
)

MAX_TOKENS = 1000
MAX_DEPTH = 40
_OPENING, _CLOSING = (
    frozenset("( [ { \\{ langle lfloor lceil".split()),
    frozenset(") ] } \\} rangle rfloor rceil".split()),
)
_LAYOUT = re.compile(
    r"\\(?:left|right)\s*\.|\\(?:displaystyle|textstyle|limits|nolimits|left|right|mleft|mright|middle|bf|rm|it|centering"
    r"|boxed|fbox|underline|hfill|strut|[bB]igg?[lrm]?)(?![a-zA-Z])|\\[!&]"
    r"|\\(?:phantom|hphantom|vphantom|textcolor|color|hspace|vspace|label|tag)\*?\s*\{[^{}]*\}"
)
_SPACE = re.compile(r"\\[,;:> ]|\\(?:thinspace|enspace|space)(?![a-zA-Z])|[\s~]+")
_THOUSANDS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:(?:,|\{,\}|\\,|\\ |\s|~)\d{3})+(?!\d|,\d)")
_FORCED_THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}|\\,|\\ |\\!|,\\!)(?=\d{3}(?!\d))")
_EXPONENT = re.compile(r"(?<![\w.}\\])((?:\d+\.?\d*|\.\d+))[eE]([+-]?\d{1,3})(?![\w.])")
_SYMBOLS = "|".join(UNIT_SYMBOLS)
_SCIENTIFIC = r"[\d.][eE][+-]?\d{1,3}|10\s*\^\s*(?:\d+|\{\s*-?\d+\s*\})"
_BEFORE_QUOTIENT = r"\d(?=\s+(?:m|km|kg|g|N|J|rad)/(?:s|h|m|kg|cm)\b)"  # 20 m/s, but 20m/s is a quotient of letters
_MEASURED = re.compile(
    rf"({_SCIENTIFIC}|{_BEFORE_QUOTIENT})\s+((?:{_SYMBOLS})(?:\s*[/*^]\s*(?:{_SYMBOLS}|\d))*)(?![A-Za-z(^_])"
)
_BASE = re.compile(r"(?<![\w}])(\d[0-9A-F]*|[A-F][0-9A-F]*\d[0-9A-F]*)_(?:\{(\d{1,2})\}|(\d{1,2})(?!\d))")
_ENVIRONMENT = re.compile(r"\\(begin|end)\s*\{(\w+)\*?\}(?:\s*\{[lcr|]*\})?")
_ASIAN = "\u2460-\u2473\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af"
_TOKEN = re.compile(
    rf"(?P<number>\d+(?:\.\d+)?|\.\d+)|(?P<letters>[a-zA-Z]+)|\\(?P<command>[a-zA-Z]+)|(?P<sign>\\[{{}}|%$\\#_]|<=|>="
    rf"|(?<![\w)}}])!=|[-+*/^_=<>(){{}}\[\],;:|!'%&$€£¥?])|(?P<word>[{_ASIAN}]+)"
)
_ARGUMENT = re.compile(r"\s*(?:\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}|(.))", re.DOTALL)
_TEXT = re.compile(rf"(?P<number>\d+(?:\.\d+)?)|(?P<word>[^\W\d_]+(?:['-][^\W\d_]+)*|[{_ASIAN}]+)|(?P<sign>\S)")
_TEXT_COMMANDS = frozenset(
    "text textbf textit textrm textnormal textsf texttt mbox mathrm mathbf mathit mathsf operatorname boldsymbol bm "
    "mathcal mathscr ce emph".split()
)
_BOLD_COMMANDS = frozenset("mathbf boldsymbol bm mathcal mathscr mathit".split())
_SEPARATING = {"or": "or", "或": "or", **dict.fromkeys(["and", *"和与且及"], ",")}
_SAME_LETTERS = {"varepsilon": "epsilon", "varphi": "phi", "vartheta": "theta", "varrho": "rho"}


class Unreadable(ValueError):
    """The text is no formula, or has a notation that cannot be read."""


@dataclass(frozen=True)
class Token:
    """A piece of an answer. `kind` is number, symbol, word, command, sign, opening or closing (brackets without their
    other half), or group; a group's `text` is its brackets, such as (], or the environment's name."""

    kind: str
    text: str
    spaced: bool = False  # whether blank space stands before it
    inner: tuple["Token", ...] = ()


def cleaned(answer: str) -> str:
    """Return the answer's text in plain characters, without layout and without dollars around formulas."""
    text = plain_characters(_from_json(answer.strip()).replace("，", ", "))
    text = common_spelling(without_repeating_decimals(text))
    text = _LAYOUT.sub(" ", _without_dollars(text)).replace("\\_", "_")
    text = re.sub(r"(?<=\d)\s*[xX]\s*(?=10\s*\^)", r"\\times ", text)
    if text.count(r"\{") > text.count(r"\}"):  # a brace before the rows of a system of equations
        text = re.sub(r"\\\{\s*(?=\\begin)", "", text)
    text = re.sub(r"^(?:\s|=|\\(?:approx|sim|therefore|because|Rightarrow|implies)(?![a-z]))+", "", text)
    return text.strip().strip("\u200b").removesuffix("\\").rstrip(". ").strip()


def _from_json(text: str) -> str:
    """Return the elements of a JSON list of texts, with commas between them; any other text as it is."""
    try:
        return ", ".join(json.loads(text)) if text.startswith('["') else text
    except (json.JSONDecodeError, TypeError):
        return text


def _without_dollars(text: str) -> str:
    """Return the text without the dollars around formulas; a single dollar is the currency."""
    dollars = len(re.findall(r"(?<!\\)\$", text))
    return re.sub(r"(?<!\\)\$", " ", text) if dollars % 2 == 0 else re.sub(r"^\$(?=\s*\d)", r"\\$", text)


def joined_thousands(text: str) -> str:
    """Return the text with 1,000 and 1 000 written as 1000."""
    return _THOUSANDS.sub(lambda number: re.sub(r"\D", "", number[0]), text)


def tokens(text: str) -> list[Token]:
    """Split a cleaned text into tokens; raise Unreadable for unknown characters and commands, and for long texts."""
    text = _MEASURED.sub(r"\1\\mathrm{\2}", _FORCED_THOUSANDS.sub("", text))
    text = _EXPONENT.sub(r"{\1\\times 10^{\2}}", text)
    result: list[Token] = []
    for token in _pieces(text):
        if token.kind == "word" and result and result[-1].kind == "word":
            result[-1] = replace(result[-1], text=f"{result[-1].text} {token.text}")
        elif token.kind == "sign" and token.text in ("pm", "mp"):
            result.append(replace(token, text=f"{token.text} {len(result)}"))  # The number makes every ± distinct.
        else:
            result.append(token)
        if len(result) > MAX_TOKENS:
            raise Unreadable("too long")
    return _grouped(result)


def _grouped(items: list[Token]) -> list[Token]:
    """Return the tokens with a group in place of each pair of brackets; an interval ]0, 1[ is a pair, too."""
    open_groups: list[list[Token]] = [[]]
    for token in items:
        is_outward = len(open_groups) > 1 and open_groups[-1][0].text == "]" and token.text == "["
        if (token.kind == "opening" and not is_outward) or (token.text == "]" and len(open_groups) == 1):
            open_groups.append([token])
        elif token.kind in ("opening", "closing") and len(open_groups) > 1:
            opening, *inner = open_groups.pop()
            is_environment = opening.text == token.text != "]"
            text = opening.text if is_environment else opening.text + token.text
            open_groups[-1].append(Token("group", text, opening.spaced, tuple(inner)))
        else:
            open_groups[-1].append(token)
        if len(open_groups) > MAX_DEPTH:
            raise Unreadable("nested too deep")
    return [token for group in open_groups for token in group]


def top_level(items: list[Token], signs: tuple[str, ...]) -> list[int]:
    """Return the indices of the signs that stand outside all brackets."""
    return [place for place, token in enumerate(items) if token.kind == "sign" and token.text in signs]


def split(items: list[Token], signs: tuple[str, ...]) -> tuple[list[list[Token]], list[str]]:
    """Return the parts between the signs outside all brackets, and these signs."""
    places = top_level(items, signs)
    starts, ends = [0, *(place + 1 for place in places)], [*places, len(items)]
    return [items[a:b] for a, b in zip(starts, ends, strict=True)], [items[place].text for place in places]


def without_braces(items: list[Token]) -> list[Token]:
    """Return the tokens without the braces, also nested ones, that enclose all of them."""
    while len(items) == 1 and items[0].text == "{}":
        items = list(items[0].inner)
    return items


def name_of(items: Iterable[Token]) -> str:
    """Return the tokens' texts as a name, such as the name in a subscript, without braces."""
    names = []
    for token in items:
        if token.kind == "group" and token.text != "{}":
            half = len(token.text) // 2
            names += [token.text[:half], name_of(token.inner), token.text[half:]]
        else:
            names.append(name_of(token.inner) if token.kind == "group" else token.text)
    return " ".join(name for name in names if name)


def with_texts(items: Iterable[Token], texts: dict[str, str]) -> list[Token]:
    """Return the tokens with their texts replaced according to `texts` (old text -> new text)."""
    return [
        replace(token, text=texts.get(token.text, token.text), inner=tuple(with_texts(token.inner, texts)))
        for token in items
    ]


def _pieces(text: str) -> Iterator[Token]:
    position, spaced, after_number = 0, False, False
    while position < len(text):
        if space := _SPACE.match(text, position):
            position, spaced = space.end(), True
            continue
        if environment := _ENVIRONMENT.match(text, position):
            position, spaced = environment.end(), False
            yield Token("opening" if environment[1] == "begin" else "closing", environment[2])
            continue
        if (number := _BASE.match(text, position)) and _is_in_base(number):
            position = number.end()
            yield Token("symbol", f"{number[1]} in base {number[2] or number[3]}", spaced)
            continue
        match = _TOKEN.match(text, position)
        if not match:
            raise Unreadable(f"character {text[position]!r}")
        position = match.end()
        kind, value = match.lastgroup or "", match[0]
        if kind == "letters" and after_number and value in (SPACED_UNITS if spaced else SHORT_UNITS):
            yield Token("word", value, spaced)
        elif kind == "letters":
            yield from _letters(value, spaced)
        elif kind == "command" and match["command"] in _TEXT_COMMANDS:
            argument = _ARGUMENT.match(text, position)
            position = argument.end() if argument else position
            content = (argument[1] or argument[2] or "") if argument else ""
            yield from _text(match["command"], content, spaced)
        elif kind == "command":
            yield _command(match["command"], spaced)
        elif kind == "word":
            yield _word(value, spaced)
        else:
            yield Token(kind, value, spaced) if kind == "number" else _sign(SIGNS.get(value, value), spaced)
        spaced, after_number = False, kind == "number" or value == "}"


def _is_in_base(number: re.Match) -> bool:
    base = int(number[2] or number[3])
    return 2 <= base <= 36 and max(int(digit, 16) for digit in number[1]) < base


def _sign(text: str, spaced: bool) -> Token:
    kind = "opening" if text in _OPENING else "closing" if text in _CLOSING else "sign"
    return Token(kind, text, spaced)


def _word(text: str, spaced: bool) -> Token:
    return Token("sign", _SEPARATING[text]) if text in _SEPARATING else Token("word", text, spaced)


def _letters(run: str, spaced: bool) -> Iterator[Token]:
    """Yield a run of letters outside a command as a word, a function's name, or letters to be multiplied."""
    lower = run.lower()
    if run in FUNCTIONS or run in CONSTANTS:
        yield Token("command", CONSTANTS.get(run, run), spaced)
    elif len(run) > 1 and (lower in WORDS or (len(run) > 3 and not run.isupper() and not set(run) <= set("abcdpqxyz"))):
        yield _word(lower, spaced)
    else:
        for place, letter in enumerate(run):
            yield Token("symbol", letter, spaced and place == 0)


def _command(name: str, spaced: bool) -> Token:
    if name in ("pmod", "bmod", "mod"):
        return Token("word", "mod", spaced)
    if name in SIGNS or name in _OPENING | _CLOSING:
        return _sign(SIGNS.get(name, name), spaced)
    name = _SAME_LETTERS.get(name, name)
    return Token("symbol" if name in GREEK and name != "pi" else "command", CONSTANTS.get(name, name), spaced)


def _text(command: str, content: str, spaced: bool) -> Iterator[Token]:
    """Yield the tokens of a text command: words, numbers, signs, and formulas between dollars."""
    bare = re.sub(r"\.(?!\d)", "", _SPACE.sub(" ", content.replace(r"\cdot", "*"))).strip()
    if bare in FUNCTIONS and (command == "operatorname" or bare not in SHORT_UNITS):
        yield Token("command", bare, spaced)
    elif bare in ("e", "i", "d") and command in ("mathrm", "operatorname"):
        yield Token("symbol", bare, spaced)
    elif re.fullmatch(r"[A-Za-z]", bare) and command in _BOLD_COMMANDS:
        yield Token("symbol", bare if command == "mathit" else f"{bare} in bold", spaced)
    elif "\\" in bare or (command.startswith("math") and not re.fullmatch(r"[A-Za-z ./%'*-]*", bare)):
        for token in _pieces(content):
            is_letter = token.kind == "symbol" and len(token.text) == 1
            yield replace(token, kind="word") if is_letter else token
    else:
        for match in _TEXT.finditer(bare):
            word = match[0]
            if match.lastgroup != "word":
                yield from _pieces(word)
            else:
                keeps_case = word in UNIT_SYMBOLS or (len(word) < 3 and word not in ("Or", "OR"))
                yield _word(word if keeps_case else word.lower(), True)
