"""The vocabulary of answers: names of functions, signs, units and the words that are no products of letters."""

from fractions import Fraction

_GREEK_NAMES = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho varsigma sigma tau "
    "upsilon phi chi psi omega"
).split()
GREEK = {
    **{name: 0x3B1 + place for place, name in enumerate(_GREEK_NAMES)},
    **{name.capitalize(): 0x391 + place for place, name in enumerate(_GREEK_NAMES) if name != "varsigma"},
    "ell": 0x2113,
    "hbar": 0x210F,
}

FUNCTIONS = frozenset(
    "sin cos tan cot sec csc arcsin arccos arctan arccot asin acos atan sinh cosh tanh arcsinh arccosh arctanh ln log "
    "lg exp sqrt min max gcd lcm det abs floor ceil Re Im arg cis".split()
)
CONSTANTS = {"pi": "pi", "infty": "infty", "infinity": "infty", "inf": "infty", "oo": "infty"}

_SIGNS = r"""
<= le leq leqslant leqq ≤; >= ge geq geqslant geqq ≥; < lt; > gt; != ne neq; = approx; in; cup bigcup; cap bigcap
minus setminus backslash; * cdot ast cdotp; times; div; pm; mp; | mid vert lvert rvert \|; : colon; deg circ degree
' prime; \{ lbrace; \} rbrace; [ lbrack; ] rbrack; langle; rangle; ( lgroup lparen; ) rgroup rparen; notin; equiv
dots ldots cdots dotsc dotsb; over; quad qquad; % \%; $ \$; € €; £ pounds; ¥ yen; , land wedge; or lor vee
-> to rightarrow; _ \_
"""
SIGNS = {spelling: names[0] for line in _SIGNS.splitlines() for names in map(str.split, line.split("; ")) if names
         for spelling in names}  # fmt: skip

# a unit, then its other spellings; spellings of three letters or more also have a plural with s
_UNITS = """
m meter metre 米; cm centimeter centimetre 厘米; mm millimeter millimetre 毫米; km kilometer kilometre 千米 公里
in inch inches; ft foot feet; yd yard; mile mi; g gram gm 克; kg kilogram kgs 千克 公斤; mg milligram
pound lb lbs £; oz ounce; liter l L litre 升; ml mL milliliter millilitre 毫升; s sec second 秒; min minute 分钟
h hr hrs hour 小时 时; day 天; week; month 月; year yr yrs 年; degree deg 度; radian rad; dollar $ usd 美元; cent
euro €; yuan ¥ 元 rmb 块; jiao 角; rupee rs; % percent percentage pct; unit 单位; ohm Ω; J joule; N newton; W watt
V volt; am a.m.; pm p.m.
"""
_UNIT_NAMES = [entry.split() for line in _UNITS.splitlines() for entry in line.split("; ") if entry]
UNITS = {
    "mph": "mile / h", "kmh": "km / h", "kph": "km / h", "平方米": "m ^ 2", "平方厘米": "cm ^ 2", "平方千米": "km ^ 2",
    "立方米": "m ^ 3", "立方厘米": "cm ^ 3",
    **{f"{name}s": names[0] for names in _UNIT_NAMES for name in names if len(name) > 2 and name.isalpha()},
    **{name: names[0] for names in _UNIT_NAMES for name in names},
}  # fmt: skip

# A text with one of these words says more than a unit.
TELLING = frozenset(
    "mod rejected if when where for of or and not is are than from with without at least most more less no none any "
    "all otherwise even odd until before after about the that which between true false yes impossible undefined "
    "hundred thousand million billion trillion dozen hundreds thousands millions billions dozens squared cubed plus "
    "minus times divided half double twice factorial negative".split()
)
# words of two or three letters, which would otherwise be read as products of letters
WORDS = frozenset("of or and if is per not the are yes red day old men cat dog for all any box odd mod sq".split()) | {
    spelling for spelling in UNITS if len(spelling) > 2 and spelling.isascii() and spelling.isalpha()
}
# These are words only behind a number; SPACED_UNITS need a space between: 2 hr is a time, 2hr is a product.
SHORT_UNITS = frozenset("cm mm km kg ft lb min sec".split())
SPACED_UNITS = SHORT_UNITS | frozenset("hr yd mi oz ml mL lbs".split())
# symbols that are units behind a number in scientific notation; elsewhere they are products of letters
UNIT_SYMBOLS = tuple(
    "GeV MeV keV eV MPa kPa Pa GHz MHz kHz Hz mol rad kJ kW MW kV mA mV mT Wb nm km cm mm kg mg W V J N A C F K T H m "
    "s g L".split()
)

_SIZES = {"M": 6, "k": 3, "c": -2, "m": -3, "n": -9}
_PREFIXES = {prefix: Fraction(10) ** size for prefix, size in _SIZES.items()}
# unit -> the base unit and the number of base units in it
CONVERSIONS = {
    "%": ("", Fraction(1, 100)),
    "min": ("s", Fraction(60)), "h": ("s", Fraction(3600)), "day": ("s", Fraction(86400)),
    "ml": ("liter", Fraction(1, 1000)), "cent": ("dollar", Fraction(1, 100)), "jiao": ("yuan", Fraction(1, 10)),
    "in": ("ft", Fraction(1, 12)),
    **{prefix + unit: (unit, factor) for prefix, factor in _PREFIXES.items()
       for unit in "m g s A V W J N Pa Hz eV".split()},
}  # fmt: skip

_MEANINGS = {
    "no solution": ["no solutions", "empty set", "the empty set", "无解", "空集"],
    "all real numbers": ["all reals", "all real", "全体实数", "任意实数"],
    "does not exist": ["dne", "doesn't exist", "不存在"],
    "infinitely many": ["infinitely many solutions", "infinite solutions", "无穷多", "无数"],
}
WORD_MEANINGS = {words: meaning for meaning, spellings in _MEANINGS.items() for words in spellings}

FRACTIONS = frozenset("frac dfrac tfrac cfrac".split())
BINOMIALS = frozenset("binom dbinom tbinom".split())
MATRICES = frozenset("matrix pmatrix bmatrix Bmatrix smallmatrix array vmatrix".split())
DECORATIONS = {
    **dict.fromkeys("vec overrightarrow overset".split(), "in bold"),
    **dict.fromkeys("overline bar widehat hat tilde widetilde".split(), "decorated"),
}
