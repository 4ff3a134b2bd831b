"""Rewrites answers that math-verify does not read into LaTeX with exactly the same meaning that it does read.

x² -> x^{2}        （1，2） -> (1,2)            0.1\\overline{6} -> \\frac{15}{90}
½ -> \\frac{1}{2}  \\big(1,2\\big) -> (1,2)    1.2e6 -> 1.2\\times 10^{6}
4 6 -> 46, as LaTeX prints it (math-verify would add the two numbers)
"""

import re
from unicodedata import normalize

MAX_DECIMAL_CHARS = 512
_VULGAR_FRACTIONS = "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"
_FRACTIONS = {char: "\\frac{" + normalize("NFKC", char).replace("\u2044", "}{") + "}" for char in _VULGAR_FRACTIONS}
_FULL_WIDTH = {chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}
_CHARACTERS = str.maketrans({"~": " ", "°": r"^\circ ", "∞": r"\infty ", "·": r"\cdot ", **_FRACTIONS, **_FULL_WIDTH})
_SUPERSCRIPTS = re.compile("⁻?[⁰¹²³⁴-⁹]+")
_COMMANDS = {
    r"\\[bB]igg?[lrm]?(?![a-zA-Z])": "",
    r"\\varnothing(?![a-zA-Z])": r"\\emptyset ",
    r"\\lbrace(?![a-zA-Z])": r"\\{",
    r"\\rbrace(?![a-zA-Z])": r"\\}",
    r"\\degree(?![a-zA-Z])": r"^\\circ ",
    r"\\ast(?![a-zA-Z])": r"\\cdot ",
    r"\\mathbb\s*([A-Z])": r"\\mathbb{\1}",
    r"√(\d+)": r"\\sqrt{\1}",
}
_REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar)\s*\{\s*(\d+)\s*\}")
_DOTTED = re.compile(r"(?<=[\d.])\\dot\s*\{?\d\}?(?:\d*\\dot\s*\{?\d\}?)?")
_EXPONENT = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))[eE]([+-]?\d{1,3})")
_MIXED = re.compile(r"([+-]?\d+)\s+(\d+)/(\d+)")
_NUMBERS = re.compile(r"[+-]?(?:[\d.,\s]|\\[,;:! ])+")
_GAP = re.compile(r"(?<=\d)(?:\s|\\[,;:! ])+(?=\d)")


def plain_characters(answer: str) -> str:
    """The answer with LaTeX commands instead of full-width forms, superscripts, vulgar fractions and some other signs.

    >>> plain_characters("３½·10⁻⁴")
    '3\\\\frac{1}{2}\\\\cdot 10^{-4}'
    """
    text = answer.translate(_CHARACTERS)
    return _SUPERSCRIPTS.sub(lambda power: "^{" + normalize("NFKC", power[0]).replace("\u2212", "-") + "}", text)


def readable(answer: str) -> str:
    """LaTeX of plain characters, rewritten so that math-verify reads it; takes time linear in the text's length.

    >>> readable(r"\\bigl[0.\\overline{3}, 1\\bigr]"), readable("1.2e-6"), readable("10 080"), readable("4, 6")
    ('[\\\\frac{3}{9}, 1]', '1.2\\\\times 10^{-6}', '10080', '4, 6')
    """
    text = answer.strip()
    for spelling, same in _COMMANDS.items():
        text = re.sub(spelling, same, text)
    text = without_repeating_decimals(text)
    if number := _EXPONENT.fullmatch(text):
        return rf"{number[1]}\times 10^{{{number[2]}}}"
    if mixed := _MIXED.fullmatch(text):
        return rf"{mixed[1]}\frac{{{mixed[2]}}}{{{mixed[3]}}}"
    return _GAP.sub("", text) if _NUMBERS.fullmatch(text) else text


def without_repeating_decimals(text: str) -> str:
    """The text with a fraction in place of every repeating decimal, whose repeating digits are overlined or dotted.

    >>> without_repeating_decimals(r"0.\\overline{3}x"), without_repeating_decimals(r"0.\\dot{1}\\dot{8}")
    ('\\\\frac{3}{9}x', '\\\\frac{18}{99}')
    """
    text = _DOTTED.sub(lambda digits: rf"\overline{{{''.join(re.findall(r'[0-9]', digits[0]))}}}", text)
    return _REPEATING.sub(_fraction, text)


def _fraction(decimal: re.Match) -> str:
    """The fraction of a repeating decimal with whole part w, n digits d and m repeating digits r.

    It is (wdr - wd) / (10^n (10^m - 1)), where wdr and wd are the numbers that these digits write.
    """
    whole, once, again = decimal.groups()
    if len(decimal[0]) > MAX_DECIMAL_CHARS:
        return decimal[0]
    above = int(whole + once + again) - int((whole + once) or "0")
    return rf"\frac{{{above}}}{{{'9' * len(again)}{'0' * len(once)}}}"
