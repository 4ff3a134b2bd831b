"""Splits the LaTeX or plain text of an answer into tokens: numbers, letters, words, commands and signs.

What only lays out (sizes, spaces, colors, dollars around formulas) leaves no token. A run of letters is a word, the
name of a function, or a product of letters.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from verl.utils.reward_score.answer_words import (
    CONSTANTS,
    FUNCTIONS,
    GREEK,
    SHORT_UNITS,
    SIGNS,
    SPACED_UNITS,
    UNIT_SYMBOLS,
    WORDS,
)
from verl.utils.reward_score.latex_spelling import common_spelling, plain_characters, without_repeating_decimals

MAX_TOKENS = 1000
MAX_DEPTH = 40
_OPENING, _CLOSING = frozenset(["(", "[", "{", "\\{"]), frozenset([")", "]", "}", "\\}"])
_LAYOUT = re.compile(
    r"\\(?:left|right)\s*\.|\\(?:displaystyle|textstyle|limits|nolimits|left|right|mleft|mright|middle|bf|rm|it|centering|boxed|fbox|underline"
    r"|hfill|strut|[bB]igg?[lrm]?)(?![a-zA-Z])|\\[!&]|\\(?:phantom|hphantom|vphantom|textcolor|color|hspace|vspace|label"
    r"|tag)\*?\s*\{[^{}]*\}"
)
_SPACE = re.compile(r"\\[,;:> ]|\\(?:thinspace|enspace|space)(?![a-zA-Z])|[\s~]+")
_UNICODE = {
    **dict(zip("≤≥≠≈∈∪∩∖→∅√×÷±∓−–—", [  # noqa: RUF001
        r"\le ", r"\ge ", r"\ne ", r"\approx ", r"\in ", r"\cup ", r"\cap ", r"\setminus ", r"\to ", r"\emptyset ",
        r"\sqrt ", r"\times ", r"\div ", r"\pm ", r"\mp ", "-", "-", "-",
    ], strict=True)),
    **{chr(code): rf"\{name} " for name, code in GREEK.items()},
    "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}", "、": ",", "。": "",
    "…": r"\ldots ", "⩽": r"\le ", "⩾": r"\ge ", "′": "'", "∣": r"\mid ", "∶": ":", "℃": "°C",
}  # fmt: skip
_CHARACTERS = str.maketrans(_UNICODE)
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
    rf"(?P<number>\d+(?:\.\d+)?|\.\d+)|(?P<letters>[a-zA-Z]+)|\\(?P<command>[a-zA-Z]+)|(?P<sign>\\[{{}}|%$\\#_]|<=|>=|(?<![\w)}}])!="
    rf"|[-+*/^_=<>(){{}}\[\],;:|!'%&$€£¥?])|(?P<word>[{_ASIAN}]+)"
)
_TEXT_COMMANDS = frozenset(
    "text textbf textit textrm textnormal textsf texttt mbox mathrm mathbf mathit mathsf operatorname boldsymbol bm "
    "mathcal mathscr ce emph".split()
)
_BOLD_COMMANDS = frozenset("mathbf boldsymbol bm mathcal mathscr mathit".split())
_SEPARATING = frozenset("和与且或及")


class Unreadable(ValueError):
    """The text is no formula, or has a notation that is not read."""


@dataclass(frozen=True)
class Token:
    """A piece of an answer; `kind` is number, symbol, word, command, sign or base_number."""

    kind: str
    text: str
    spaced: bool = False  # whether blank space stands before it


def cleaned(answer: str) -> str:
    """Return the answer's text in plain characters, without what only lays out, and without dollars around formulas."""
    text = plain_characters(_from_json(answer.strip()).replace("，", ", ")).translate(_CHARACTERS)
    text = common_spelling(without_repeating_decimals(text))
    text = _LAYOUT.sub(" ", _without_dollars(text)).replace("\\_", "_")
    text = re.sub(r"(?<=\d)\s*[xX]\s*(?=10\s*\^)", r"\\times ", text)
    if text.count(r"\{") > text.count(r"\}"):  # a brace before the rows of a system of equations
        text = re.sub(r"\\\{\s*(?=\\begin)", "", text)
    text = re.sub(r"^(?:\s|=|\\(?:approx|sim|therefore|because|Rightarrow|implies)(?![a-z]))+", "", text)
    return text.strip().strip("\u200b").removesuffix("\\").rstrip(". ").strip()


def _from_json(text: str) -> str:
    """Return the elements of a JSON list of texts, with commas between them; any other text as it is."""
    if not (text.startswith('["') and text.endswith('"]')):
        return text
    try:
        return ", ".join(json.loads(text))
    except (json.JSONDecodeError, TypeError):
        return text


def _without_dollars(text: str) -> str:
    """Return the text without the dollars around formulas; a single one is the currency."""
    dollars = len(re.findall(r"(?<!\\)\$", text))
    return re.sub(r"(?<!\\)\$", " ", text) if dollars % 2 == 0 else re.sub(r"^\$(?=\s*\d)", r"\\$", text)


def joined_thousands(text: str) -> str:
    """Return the text with 1,000 and 1 000 written as 1000."""
    return _THOUSANDS.sub(lambda number: re.sub(r"\D", "", number[0]), text)


def tokens(text: str) -> list[Token]:
    """Split a cleaned text.

    Raises:
        Unreadable: a character or command without a meaning here, or too many tokens.
    """
    text = _FORCED_THOUSANDS.sub("", text)
    text = _MEASURED.sub(r"\1\\mathrm{\2}", text)
    text = _EXPONENT.sub(lambda number: rf"\scientific{{{number[1]}}}{{{number[2]}}}", text)
    text = _BASE.sub(_in_base, text)
    result: list[Token] = []
    depth = 0
    for token in _pieces(text):
        last = result[-1] if result else None
        if token.kind == "word" and last and last.kind == "word" and not (_is_and(token) or _is_and(last)):
            result[-1] = replace(last, text=f"{last.text} {token.text}")
        else:
            result.append(token)
        depth += (token.text in _OPENING) - (token.text in _CLOSING)
        if len(result) > MAX_TOKENS or depth > MAX_DEPTH:
            raise Unreadable("too long, or nested too deep")
    return [_separator(token.text) if _is_and(token) else token for token in result]


def _separator(word: str) -> Token:
    return Token("sign", "or" if word in ("or", "或") else ",")


def _is_and(token: Token) -> bool:
    return token.kind == "word" and token.text in ("and", "or")


def _in_base(number: re.Match) -> str:
    base = int(number[2] or number[3])
    digits = [int(digit, 16) for digit in number[1]]
    return rf"\inbase{{{number[1]}}}{{{base}}}" if 2 <= base <= 36 and max(digits) < base else number[0]


def _pieces(text: str) -> Iterator[Token]:
    position, spaced, after_number = 0, False, False
    while position < len(text):
        if space := _SPACE.match(text, position):
            position, spaced = space.end(), True
            continue
        if environment := _ENVIRONMENT.match(text, position):
            position, spaced = environment.end(), False
            yield Token("command", f"{environment[1]} {environment[2]}")
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
            content, position = _argument(text, position)
            yield from _text(match["command"], content, spaced)
        elif kind == "command":
            yield from _command(match["command"], spaced)
        elif kind == "word":
            yield _separator(value) if value in _SEPARATING else Token("word", value, spaced)
        else:
            yield Token("number" if kind == "number" else "sign", SIGNS.get(value, value), spaced)
        spaced, after_number = False, kind == "number" or value == "}"


def _letters(run: str, spaced: bool) -> Iterator[Token]:
    """Return a run of letters outside a command as a word, a name of a function, or letters that are multiplied."""
    lower = run.lower()
    if run in FUNCTIONS or run in CONSTANTS:
        yield Token("command", CONSTANTS.get(run, run), spaced)
    elif len(run) > 1 and (lower in WORDS or (len(run) > 3 and not run.isupper() and not set(run) <= set("abcdpqxyz"))):
        yield Token("word", lower, spaced)
    else:
        for place, letter in enumerate(run):
            yield Token("symbol", letter, spaced and place == 0)


def _command(name: str, spaced: bool) -> Iterator[Token]:
    if name in ("quad", "qquad"):
        yield Token("sign", "quad", spaced)
    elif name in ("pmod", "bmod", "mod"):
        yield Token("word", "mod", spaced)
    elif name in SIGNS:
        yield Token("sign", SIGNS[name], spaced)
    else:
        name = {"varepsilon": "epsilon", "varphi": "phi", "vartheta": "theta", "varrho": "rho"}.get(name, name)
        yield Token("symbol" if name in GREEK and name != "pi" else "command", CONSTANTS.get(name, name), spaced)


def _argument(text: str, position: int) -> tuple[str, int]:
    """Return the content of the braces at a position, or else the next character; and the position behind it."""
    while position < len(text) and text[position].isspace():
        position += 1
    if not text.startswith("{", position):
        return text[position : position + 1], position + 1
    depth = 0
    for place in range(position, len(text)):
        depth += (text[place] == "{") - (text[place] == "}")
        if depth == 0:
            return text[position + 1 : place], place + 1
    raise Unreadable("a brace is not closed")


def _text(command: str, content: str, spaced: bool) -> Iterator[Token]:
    """The tokens of \\text{...} and its kin: words, but numbers, signs and formulas between dollars for themselves."""
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
            yield Token("word", token.text, token.spaced) if is_letter else token
    else:
        for number, word, sign in re.findall(rf"(\d+(?:\.\d+)?)|([^\W\d_]+(?:['-][^\W\d_]+)*|[{_ASIAN}]+)|(\S)", bare):
            if number or sign:
                yield from _pieces(number or sign)
            elif word in _SEPARATING:
                yield _separator(word)
            else:
                keeps_case = word in UNIT_SYMBOLS or (len(word) < 3 and word not in ("Or", "OR"))
                yield Token("word", word if keeps_case else word.lower(), True)
