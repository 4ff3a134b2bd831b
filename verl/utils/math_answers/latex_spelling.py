"""Rewrites the characters and notations of an answer into LaTeX with exactly the same meaning.

x² -> x^{2}        （1，2） -> (1,2)            0.1\\overline{6} -> \\frac{15}{90}
½ -> \\frac{1}{2}  {10 \\choose 3} -> \\binom{10}{3}
"""

import re
from unicodedata import normalize

from verl.utils.math_answers.words import GREEK

_VULGAR_FRACTIONS = "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"
_FRACTIONS = {char: "\\frac{" + normalize("NFKC", char).replace("\u2044", "}{") + "}" for char in _VULGAR_FRACTIONS}
_FULL_WIDTH = {chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}
_SIGNS = dict(zip("≤≥≠≈∈∪∩∖→∅√×÷±∓…⩽⩾∣∞·", (  # noqa: RUF001
    r"\le \ge \ne \approx \in \cup \cap \setminus \to \emptyset \sqrt \times \div \pm \mp \ldots \le \ge \mid \infty "
    r"\cdot"
).split(), strict=True))  # fmt: skip
_CHARACTERS = str.maketrans({
    **{char: f"{command} " for char, command in _SIGNS.items()},
    **{chr(code): rf"\{name} " for name, code in GREEK.items()},
    **dict.fromkeys("−–—", "-"),  # noqa: RUF001
    "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}", "、": ",", "。": "", "′": "'",
    "∶": ":", "℃": r"^\circ C", "°": r"^\circ ", "~": " ", **_FRACTIONS, **_FULL_WIDTH,
})  # fmt: skip
_SUPERSCRIPTS = re.compile("⁻?[⁰¹²³⁴-⁹]+")
_REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar)\s*\{\s*(\d+)\s*\}")
_DOTTED = re.compile(r"(?<=[\d.])\\dot\s*\{?\d\}?(?:\d*\\dot\s*\{?\d\}?)?")
_NUMBER_WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty"
).split()
NUMBER_WORDS = {word: value for value, word in enumerate(_NUMBER_WORDS)}
_TEXT = r"\\(?:text|mathrm|textrm|mbox|textbf)\s*\{[\s~]*"
_CIRCLE = r"(?:\\[, ]|\s)*\^\{?\s*\\circ\s*\}?\s*"
_GAP = r"(?:[\s,;(~]|\\[,; ])*"
_PARAMETER = rf"{_GAP}(?:{_TEXT}[\s,(]*)?(?:(?:where|for|with)\b\s*)?\}}?\s*"
_SPELLINGS = [
    (re.compile(pattern), same)
    for pattern, same in {
        r"\\\\\[[^\[\]]*(?:pt|em|ex|mm|cm)\]": r"\\\\ ",
        r"(?<!\\)\\[()\[\]]": " ",
        rf"\^\{{?{_TEXT}(?:st|nd|rd|th)\}}\}}?|\b(?:np|math)\.(?=[a-z])": "",
        r"^(\d\d?:\d\d)\s*([aApP])[mM]$": r"\1\\text{\2m}",
        rf"(?i)^{_TEXT}(?:option|choice|answer)\s*:?\s*\}}|^选择?(?=\s*[A-F])": "",
        rf"^[\d.]+\s*\\?%\s*{_TEXT}(?:CI|confidence interval)\s*:?\s*\}}\s*:?(?=\s*[\[(])": "",
        r"(?<=[a-zA-Z]):\s*\}": "}",
        r"\{\s*([^{}]+?)\s*\\choose\s+([^{}]+?)\s*\}": r"\\binom{\1}{\2}",
        r"\\(?:hat|vec)\s*\{\s*(\\(?:mathbf|boldsymbol)\s*\{\s*[ijk]\s*\})\s*\}": r"\1",
        r"\\(?:hat|vec|mathbf|boldsymbol|bm)\s*\{\s*\\?([ijk])(?:math)?\s*\}": r"\\mathbf{\1}",
        r"(\d+)\s*\^\{?\s*\\circ\s*\}?\s*(\d+)\s*(?:'|\^\{?\s*\\prime\s*\}?)(?!')": r"{(\1+\\frac{\2}{60})^\\circ}",
        rf"{_CIRCLE}(?:{_TEXT}C\s*\}}|C(?=\s*(?:\}}|$)))": r"\\text{ celsius}",
        rf"{_CIRCLE}(?:{_TEXT}F\s*\}}|F(?=\s*(?:\}}|$)))": r"\\text{ fahrenheit}",
        r"degrees?\s+(?=[Cc]elsius|[Ff]ahrenheit)": "",
        rf"{_TEXT}([0-9A-F]+)\}}_(?=\{{?\d)": r"\1_",
        rf"(?<=\d)(?:\s|\\ )*({_TEXT})?(?:million\b|百万)": r"\\times 10^{6}\1",
        rf"(?<=\d)(?:\s|\\ )*({_TEXT})?billion\b": r"\\times 10^{9}\1",
        r"(?<=\d)\s*万(?![\u4e00-\u9fff]*\d)": r"\\times 10^{4}",
        rf"^(-?[\d.]+)\s*(?:{_TEXT}to\s*\}}|to)\s*(-?[\d.]+)$": r"\1:\2",
        rf"^(\d+)\s*(?:{_TEXT}(?:R|r|remainder)\s*\}}|R|remainder|余)\s*(\d+)$": r"\1\\text{ remainder }\2",
        r"时\s*(\d+)\s*分(?!钟)": r"时\1分钟",
        r"百分之([\d.]+)": r"\1\\%",
        rf"{_PARAMETER}\$?([a-zA-Z])\$?\s*(?:{_TEXT})?\s*(?:is an|is any|为|是)\s*(?:integer|整数)[)}}.\s]*$":
            r", \1\\in\\mathbb{Z}",
        rf"{_GAP}(?:{_TEXT}[\s,(]*)?for\s+(?:any |all |every |each )?integers?\s*\}}?\s*\$?([a-zA-Z])\$?[)}}.\s]*$":
            r", \1\\in\\mathbb{Z}",
    }.items()
]  # fmt: skip
_BASE_IN_WORDS = re.compile(rf"_\{{?\s*{_TEXT}({'|'.join(_NUMBER_WORDS[2:])})\s*\}}\}}?")
_CIRCLED = re.compile(r"[①-⑳][①-⑳\s,、]*")


def plain_characters(answer: str) -> str:
    """Return the answer with LaTeX or ASCII for superscripts, fractions in one character, full-width and other signs.

    >>> plain_characters("３½·10⁻⁴")
    '3\\\\frac{1}{2}\\\\cdot 10^{-4}'
    """
    text = answer.translate(_CHARACTERS)
    return _SUPERSCRIPTS.sub(lambda power: "^{" + normalize("NFKC", power[0]).replace("\u2212", "-") + "}", text)


def common_spelling(text: str) -> str:
    """Return the text with a single notation for units of temperature, binomials, domains of parameters, and others.

    >>> common_spelling(r"{10 \\choose 3}"), common_spelling(r"\\pi n, \\text{ where } n \\text{ is an integer}")
    ('\\\\binom{10}{3}', '\\\\pi n, n\\\\in\\\\mathbb{Z}')
    """
    for pattern, same in _SPELLINGS:
        text = pattern.sub(same, text)
    if _CIRCLED.fullmatch(text):
        text = ", ".join(re.findall("[①-⑳]", text))
    return _BASE_IN_WORDS.sub(lambda base: f"_{{{NUMBER_WORDS[base[1]]}}}", text)


def without_repeating_decimals(text: str) -> str:
    """Return the text with fractions in place of repeating decimals, whose repeating digits are overlined or dotted.

    >>> without_repeating_decimals(r"0.\\overline{3}x"), without_repeating_decimals(r"0.\\dot{1}\\dot{8}")
    ('\\\\frac{3}{9}x', '\\\\frac{18}{99}')
    """
    text = _DOTTED.sub(lambda digits: rf"\overline{{{''.join(re.findall(r'[0-9]', digits[0]))}}}", text)
    return _REPEATING.sub(_fraction, text)


def _fraction(decimal: re.Match) -> str:
    """Return the fraction (wdr - wd) / (10^n (10^m - 1)) of a repeating decimal with whole part w, n digits d and m
    repeating digits r; wdr and wd are the numbers that these digits write."""
    whole, once, again = decimal.groups()
    above = int(whole + once + again) - int((whole + once) or "0")
    return rf"\frac{{{above}}}{{{'9' * len(again)}{'0' * len(once)}}}"
