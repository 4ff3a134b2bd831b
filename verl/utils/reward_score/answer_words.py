"""The vocabulary of answers: names of functions, signs, units and the words that are no products of letters."""

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
    "lg exp sqrt min max gcd lcm det abs floor ceil Re Im arg".split()
)
CONSTANTS = {"pi": "pi", "infty": "infty", "infinity": "infty", "inf": "infty", "oo": "infty"}

_SPELLINGS = {
    "<=": "<= le leq leqslant leqq ≤",
    ">=": ">= ge geq geqslant geqq ≥",
    "<": "lt",
    ">": "gt",
    "!=": "!= ne neq",
    "=": "approx",
    "in": "in",
    "cup": "cup bigcup",
    "cap": "cap bigcap",
    "minus": "setminus backslash",
    "*": "cdot times ast cdotp",
    "div": "div",
    "pm": "pm",
    "mp": "mp",
    "|": "mid vert lvert rvert \\|",
    ":": "colon",
    "deg": "circ degree",
    "'": "prime",
    "\\{": "lbrace",
    "\\}": "rbrace",
    "[": "lbrack",
    "]": "rbrack",
    "langle": "langle",
    "rangle": "rangle",
    "(": "lgroup lparen",
    ")": "rgroup rparen",
    "dots": "ldots cdots dots dotsc dotsb",
    "over": "over",
    "%": "\\%",
    "$": "\\$ $",
    "€": "€",
    "£": "£ pounds",
    "¥": "¥ yen",
    ",": "land wedge",
    "or": "lor vee",
    "->": "to rightarrow",
    "notin": "notin",
    "equiv": "equiv",
    "_": "\\_",
}
SIGNS = {spelling: sign for sign, spellings in _SPELLINGS.items() for spelling in spellings.split()}

_UNITS = {
    "m": "meter meters metre metres 米",
    "cm": "centimeter centimeters centimetre centimetres 厘米",
    "mm": "millimeter millimeters millimetre millimetres 毫米",
    "km": "kilometer kilometers kilometre kilometres 千米 公里",
    "in": "inch inches",
    "ft": "foot feet",
    "yd": "yard yards",
    "mile": "mi miles",
    "g": "gram grams gm 克",
    "kg": "kilogram kilograms kgs 千克 公斤",
    "m ^ 2": "平方米",
    "cm ^ 2": "平方厘米",
    "km ^ 2": "平方千米",
    "m ^ 3": "立方米",
    "cm ^ 3": "立方厘米",
    "mg": "milligram milligrams",
    "pound": "lb lbs pounds £",
    "oz": "ounce ounces",
    "liter": "l L liters litre litres 升",
    "ml": "mL milliliter milliliters 毫升",
    "s": "sec secs second seconds 秒",
    "min": "mins minute minutes 分钟",
    "h": "hr hrs hour hours 小时 时",
    "day": "days 天",
    "week": "weeks",
    "month": "months 月",
    "year": "yr yrs years 年",
    "degree": "deg degs degrees 度",
    "radian": "rad rads radians",
    "mile / h": "mph",
    "km / h": "kmh kph",
    "dollar": "$ dollars usd 美元",
    "cent": "cents",
    "euro": "€ euros",
    "yuan": "¥ 元 rmb 块",
    "rupee": "rs rupees",
    "%": "percent percentage pct percents",
    "unit": "units 单位",
    "ohm": "ohms Ω",
    "J": "joule joules",
    "N": "newton newtons",
    "W": "watt watts",
    "V": "volt volts",
    "am": "a.m.",
    "pm": "p.m.",
}
UNITS = {spelling: unit for unit, spellings in _UNITS.items() for spelling in [unit, *spellings.split()]}
ASIAN_UNITS = frozenset(spelling for spelling in UNITS if spelling > "\u2fff")

# a text with such a word says more than a unit does
TELLING = frozenset(
    "mod rejected if when where for of or and not is are than from with without at least most more less no none any "
    "all otherwise even odd until before after about the that which between true false yes impossible undefined "
    "hundred thousand million billion trillion dozen hundreds thousands millions billions dozens squared cubed plus "
    "minus times divided half double twice factorial negative".split()
)
# words of two or three letters, which would else be products of letters
WORDS = frozenset("of or and if is per not the are yes red day old men cat dog for all any box odd mod sq".split()) | {
    spelling for spelling in UNITS if len(spelling) > 2 and spelling.isascii() and spelling.isalpha()
}
# words only behind a number, the second only with a space between them: 2 hr is a time, 2hr is a product
SHORT_UNITS = frozenset("cm mm km kg ft lb min sec".split())
SPACED_UNITS = SHORT_UNITS | frozenset("hr yd mi oz ml mL lbs".split())
# symbols that are units behind a number in scientific notation; elsewhere they are letters that are multiplied
UNIT_SYMBOLS = tuple(
    "GeV MeV keV eV MPa kPa Pa GHz MHz kHz Hz mol rad kJ kW MW kV mA mV mT Wb nm km cm mm kg mg W V J N A C F K T H m "
    "s g L".split()
)

FRACTIONS = frozenset("frac dfrac tfrac cfrac".split())
BINOMIALS = frozenset("binom dbinom tbinom".split())
MATRICES = frozenset("matrix pmatrix bmatrix Bmatrix smallmatrix array".split())
DECORATIONS = {
    **dict.fromkeys("vec overrightarrow overset".split(), "in bold"),
    **dict.fromkeys("overline bar widehat hat tilde widetilde".split(), "decorated"),
}
