r"""Answers of mathematics against verdicts given by hand: almost 500 pairs; and which part of a response is the answer.

PAIRS: group -> lines of `truth == answer` (equal) or `truth != answer` (not). KNOWN: where the reward says otherwise,
and why; a pair that is no longer otherwise must leave it. Hostile answers have a second each, the others all they need,
so that a busy machine changes nothing.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest

from verl.utils.math_answers.comparison import compute_score
from verl.utils.math_answers.latex_spelling import common_spelling, plain_characters, without_repeating_decimals

PAIRS = {
    "integers": r"""
        7 == 7
        7 == +7
        7 == 7.
        7 == 07
        7 == 7.0
        7 == 7.000
        -7 == -7
        -7 == −7
        7 == ７
        7 != -7
        7 != 8
        7 != 77
        7 != VII
        0 == -0
        120 == 5!
        8 == 2^3
        8 == 2^{3}
        8 == 2³
        8 != 2^4
        4 == (-2)^2
        4 != -2^2
        2^{100} == 1267650600228229401496703205376
        2^{100} != 1267650600228229401496703205375
        2^{2023} == 2\cdot 2^{2022}
        2^{2023}-1 != 2^{2023}
        3^{100} == 9^{50}
        1000! != 999!
        15 == \binom{6}{2}
        20 != \binom{6}{2}
        3 == |{-3}|
        2 == \lfloor 2.7 \rfloor
        3 == \lceil 2.1 \rceil
        2 == \gcd(4,6)
        42 == \text{forty-two}
        1 != 0.999999
        5 != 5.0000001
        10 != 4 6
        10 != 7\ 3
        10 != 4 \quad 6
        123456789 != 123456788
    """,
    "fractions": r"""
        \frac{1}{2} == 1/2
        \frac{1}{2} == \frac12
        \frac{1}{2} == \frac1{2}
        \frac{1}{2} == \frac 1 2
        \frac{1}{2} == \dfrac{1}{2}
        \frac{1}{2} == \tfrac 1 2
        \frac{1}{2} == \cfrac{1}{2}
        \frac{1}{2} == \frac{2}{4}
        \frac{1}{2} == 0.5
        \frac{1}{2} == .5
        \frac{1}{2} == ½
        \frac{1}{2} == 1 \over 2
        \frac{1}{2} == {1 \over 2}
        \frac{1}{2} == (1)/(2)
        \frac{1}{2} == 1\div 2
        \frac{1}{2} == $\frac{1}{2}$
        \frac{1}{2} == \(\frac{1}{2}\)
        \frac{1}{2} == \left(\frac{1}{2}\right)
        \frac{1}{2} != \frac{1}{3}
        \frac{1}{2} != 2/1
        -\frac{1}{2} == \frac{-1}{2}
        -\frac{1}{2} == \frac{1}{-2}
        -\frac{1}{2} == -.5
        -\frac{1}{2} != \frac{1}{2}
        \frac{\frac{1}{2}}{3} == \frac{1}{6}
        \frac{1}{6} == 1/2/3
        \frac{14}{3} == \frac{28}{6}
        \frac{5}{6} == \frac12+\frac13
        \frac{355}{113} != \pi
        \frac{22}{7} != \pi
        \frac{a}{b} == a/b
        \frac{a}{b} != b/a
        \frac{x+1}{2} == \frac{x}{2}+\frac{1}{2}
        3:4 == 3:4
        3:4 == 6:8
        3:4 != 4:3
        2:3:4 == 4:6:8
    """,
    "mixed numbers": r"""
        \frac{7}{2} == 3\frac{1}{2}
        \frac{7}{2} == 3 \frac{1}{2}
        \frac{7}{2} == 3\dfrac{1}{2}
        \frac{7}{2} == 3½
        3\frac{1}{2} == 3.5
        3\frac{1}{2} == 3 1/2
        3\frac{1}{2} != \frac{3}{2}
        -3\frac{1}{2} == -3.5
        -3\frac{1}{2} != -2.5
        1\frac{3}{4} == \frac{7}{4}
    """,
    "decimals": r"""
        0.5 == 0.50
        2.50 == 2.5
        100.0 == 100
        0.1 == 0.10000
        0.25 == \frac{1}{4}
        0.0625 == 2^{-4}
        0.001 == 10^{-3}
        0.001 == 10⁻³
        1.5 != 1.05
        1.23 != 1.24
        0.333 != \frac{1}{3}
        \frac{1}{3} != 0.33
        \frac{1}{3} != 0.33333
        \frac{1}{3} != 0.333333
        \frac{2}{3} != 0.67
        \frac{2}{3} != 0.6667
        \frac{1}{3} == 0.\overline{3}
        0.\overline{3} == \frac{1}{3}
        0.\overline{3} == 0.\bar{3}
        \frac{1}{6} == 0.1\overline{6}
        \frac{13}{11} == 1.\overline{18}
        1 == 0.\overline{9}
        -\frac{1}{3} == -0.\overline{3}
        \frac{1}{3} != 0.3\overline{6}
        0.0000001 != 0.0000002
        0 != 0.0000001
    """,
    "percent": r"""
        50\% == 50\%
        50 == 50\%
        50\% == 50
        50\% == 50%
        50\% == 50％
        50\% == 0.5
        50\% == \frac{1}{2}
        0.5 == 50\%
        \frac{1}{2} == $50\%$
        12.5\% == \frac{1}{8}
        50\% == 50 \text{ percent}
        50\% != 60\%
        50\% != 0.05
        \frac{1}{2} != 5\%
        \frac{1}{2} != 0.5\%
    """,
    "thousands": r"""
        10080 == 10,080
        10080 == 10{,}080
        10080 == 10\,080
        10080 == 10 080
        10^4+80 == 10 080
        10^4+80 == 10\,080
        1234567 == 1,234,567
        1234567 == 1{,}234{,}567
        1,234,567 == 1234567
        1000 == 1,000.00
        1,000,000 == 10^6
        1234 != 1,235
        1000000 != 1,000
        1000 != 1.000
        12345 != 12_345
    """,
    "scientific notation": r"""
        1200000 == 1.2 \times 10^6
        1200000 == 1.2 \cdot 10^{6}
        1200000 == 1.2·10⁶
        1200000 == 1.2e6
        1200000 == 1.2E+6
        1200000 != 1.2 \times 10^5
        1200000 != 1.2e5
        3 \times 10^8 == 300000000
        3 \times 10^8 == 3*10^8
        6.02 \times 10^{23} != 6.03 \times 10^{23}
        0.00012 == 1.2 \times 10^{-4}
        0.00012 == 1.2e-4
        1.2\times 10^{-4} != 1.2\times 10^{4}
        10^{-7} != 2\cdot 10^{-7}
        10^{20} != 10^{20}+1
        5\times10^{3} == 5000
    """,
    "units": r"""
        10 == 10\text{ cm}
        10\text{ cm} == 10
        10\text{ cm} == 10 \mathrm{cm}
        10 == 10\mathrm{~cm}
        10 == 10~\text{cm}
        10 == 10 cm
        10 == 10cm
        10 == 10 \text{ cm}^2
        10 \text{ cm}^2 == 10
        10 == 10\ \mathrm{m/s}
        10 == 10 \mathrm{~m} / \mathrm{s}
        36 == 36 \, \text{km/h}
        36 == 36\,\frac{\text{km}}{\text{h}}
        5 == 5 \text{ hours}
        5 == 5 hours
        5 != 6 \text{ hours}
        12 == 12 \text{ square units}
        12 == 12\text{ sq. ft.}
        8 == 8 \text{ apples}
        3 == \text{3 apples}
        7 == 7\mbox{ days}
        2\sqrt{3} == 2\sqrt{3}\text{ cm}
        10 \text{ cm} != 10 \text{ m}
        1\text{ hour} == 60\text{ minutes}
        12 != 12 \text{ of } 15
    """,
    "degrees": r"""
        90 == 90^\circ
        90^\circ == 90
        90^{\circ} == 90^\circ
        90 == 90°
        90 == 90\degree
        90 == 90\text{ degrees}
        90^\circ != 80^\circ
        25 == 25^{\circ}\mathrm{C}
        90^\circ == \frac{\pi}{2}
        \frac{1}{2} == \cos 60^\circ
    """,
    "money": r"""
        5 == \$5
        \$5 == 5
        \$5 == \$5.00
        5 == $5
        1250 == \$1,250.00
        1250 == \$1{,}250
        5 == 5\text{ dollars}
        25 == 25 \text{ USD}
        5 != \$6
        5 == \pounds 5
        5 == €5
    """,
    "intervals": r"""
        [0,1] == [0, 1]
        [0,1) == \left[0,1\right)
        [0,1) == \big[0,1\big)
        [0,1) == [0,1.0)
        [0.5,1] == [\frac{1}{2},1]
        (0,1) == （0，1）
        [0,1] != [0,1)
        (0,1) != [0,1]
        [0,1] != [1,0]
        [0,1] != \{0,1\}
        [-1,1] != (-1,1]
        (-\infty,3] == (-\infty, 3]
        (-\infty,3] != (-\infty,3)
        (3,\infty) == (3,+\infty)
        (3,\infty) == (3,∞)
        (-\infty,3) == x<3
        [3,\infty) == x\ge 3
        x\ge 3 == [3,\infty)
        x\ge 3 == x \geq 3
        x\ge 3 == x \geqslant 3
        x\ge 3 == x≥3
        x\ge 3 == 3 \le x
        x\ge 3 != x>3
        x\ge 3 != x\le 3
        x\ge 3 != 3
        [1,2] == 1\le x\le 2
        (1,2) == 1<x<2
        [1,2] != 1<x<2
        x\in[0,1] == [0,1]
        (-\infty,1)\cup(2,\infty) == (-\infty,1) \cup (2,\infty)
        (-\infty,1)\cup(2,\infty) == (2,\infty)\cup(-\infty,1)
        (-\infty,1)\cup(2,\infty) == (-\infty,1)∪(2,\infty)
        (-\infty,1)\cup(2,\infty) != (-\infty,1]\cup(2,\infty)
        (-\infty,1)\cup(2,\infty) != (-\infty,1)
        (-\infty,1)\cup(2,\infty) == x<1 \text{ or } x>2
        x<1 \text{ or } x>2 == x>2 \text{ or } x<1
        [1,3] == [1,2]\cup[2,3]
        (-\infty,\infty) == \mathbb{R}
        \mathbb{R} == \mathbb R
        \mathbb{R}\setminus\{1\} == (-\infty,1)\cup(1,\infty)
        x\ne 2 == (-\infty,2)\cup(2,\infty)
        (0,1] == ]0,1]
    """,
    "sets and lists": r"""
        \{1,2,3\} == \{3,2,1\}
        \{1,2,3\} != \{1,2\}
        \{1,2\} != \{1,2,3\}
        \{1,2\} == \left\{1,2\right\}
        \{1,2\} == \lbrace 1,2\rbrace
        \{1,2\} == \{1,1,2\}
        \{1,2\} == 1, 2
        \{\frac{1}{2}, 3\} == \{0.5, 3\}
        \{a,b\} == \{b,a\}
        \{5\} == 5
        \{1,2,3\} == \{1,2\}\cup\{3\}
        \{1,2\} != (1,2)
        \{1,2\} != [1,2]
        1,2 == 2,1
        1,2 == 1;2
        1,2 == 1 \text{ and } 2
        1,2 == 1 \text{ or } 2
        1,2 == 1 and 2
        1,2 != 1,3
        1,2 != 1
        1 != 1,2
        5 != 5 or 6
        5 != 5; 6
        \emptyset == \varnothing
        \emptyset == ∅
        \emptyset == \{\}
        \emptyset != 0
        \emptyset != \{\emptyset\}
        \pm 2 == 2, -2
        2,-2 == ±2
        \pm 2 != 2
        1 \pm \sqrt{2} == 1+\sqrt{2}, 1-\sqrt{2}
        \{(1,2),(3,4)\} == \{(3,4),(1,2)\}
        (1,2),(3,4) == (3,4),(1,2)
        (1,2),(3,4) != (2,1),(3,4)
    """,
    "tuples": r"""
        (1,2) == (1, 2)
        (1,2) == \left(1,2\right)
        (1,2) == \big(1,2\big)
        (1,2) == \Bigl(1,2\Bigr)
        (1,2) == (1.0,2.0)
        (1,2) == (1,2).
        (1,2) == (1;2)
        (1,2) == (x,y)=(1,2)
        (1,2) == \langle 1,2\rangle
        (1,2) != (2,1)
        (1,2) != (1,-2)
        (1,2) != [1,2]
        (1,2) != 2,1
        (1,2) != 1 2
        (1,2,3) == (1,2,3)
        (1,2,3) != (1,2)
        (1,2,3) != (3,2,1)
        (1,1,2) != (1,2)
        (\frac{1}{2},3) == (0.5,3)
        (3,\frac{\pi}{2}) == \left(3, \frac{\pi}{2}\right)
        (3,\frac{\pi}{2}) != (3, 1.57)
    """,
    "matrices": r"""
        \begin{pmatrix}1&2\\3&4\end{pmatrix} == \begin{bmatrix}1&2\\3&4\end{bmatrix}
        \begin{pmatrix}1&2\\3&4\end{pmatrix} == \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}
        \begin{pmatrix}1&2\\3&4\end{pmatrix} == \left(\begin{array}{cc}1&2\\3&4\end{array}\right)
        \begin{pmatrix}1&2\\3&4\end{pmatrix} == \begin{pmatrix}1&3\\2&4\end{pmatrix}^T
        \begin{pmatrix}1&2\\3&4\end{pmatrix} != \begin{pmatrix}1&3\\2&4\end{pmatrix}
        \begin{pmatrix}1\\2\end{pmatrix} != \begin{pmatrix}1&2\end{pmatrix}
        \begin{pmatrix}1\\2\end{pmatrix} != \begin{pmatrix}1\\2\\3\end{pmatrix}
        \begin{pmatrix}-1\\2\end{pmatrix} != \begin{pmatrix}1\\2\end{pmatrix}
        \begin{pmatrix}\frac{1}{2}\\2\end{pmatrix} == \begin{pmatrix}0.5\\2\end{pmatrix}
        \begin{pmatrix}1\\2\end{pmatrix} == \begin{pmatrix}1\\2\\\end{pmatrix}
        \begin{pmatrix}1\\2\end{pmatrix} == \begin{pmatrix}1\\[2pt]2\end{pmatrix}
        -2 == \begin{vmatrix}1&2\\3&4\end{vmatrix}
    """,
    "roots": r"""
        \sqrt{2} == \sqrt2
        \sqrt{2} == 2^{1/2}
        \sqrt{2} == 2^{\frac{1}{2}}
        \sqrt{2} == 2^{0.5}
        \sqrt{2} == √2
        \sqrt{12} == 2√3
        \sqrt{2} != 1.41
        \sqrt{2} != 1.414214
        \sqrt{2} != \sqrt{3}
        \sqrt{8} == 2\sqrt{2}
        \sqrt{242} == 11\sqrt 2
        2\sqrt{2} == \sqrt{2}\cdot 2
        2 == \sqrt[3]{8}
        2 == \sqrt 4
        \sqrt[3]{2} == 2^{\frac{1}{3}}
        \sqrt[3]{2} != \sqrt{2}
        \frac{1}{\sqrt{2}} == \frac{\sqrt{2}}{2}
        \sqrt{3}+\sqrt{2} == \sqrt{2}+\sqrt{3}
        \sqrt{3}+\sqrt{2} != \sqrt{5}
        \sqrt{3+2\sqrt{2}} == 1+\sqrt{2}
        \sqrt{\frac{1}{4}} == 0.5
        \sqrt{x^2} != x
        \frac{1+\sqrt{5}}{2} == \frac{1}{2}+\frac{\sqrt5}{2}
        \frac{1+\sqrt{5}}{2} != \frac{1-\sqrt{5}}{2}
        2\sqrt{3} == 2*sqrt(3)
    """,
    "pi, e and logarithms": r"""
        \pi == π
        2\pi == \pi\cdot 2
        \frac{\pi}{4} == \frac14\pi
        \frac{9\pi}{4} == 2.25\pi
        \frac{\pi}{4} != \frac{\pi}{3}
        \pi == pi
        3.14 != \pi
        \pi != 3.1416
        \pi != 3.14159265
        \frac{\pi}{4} == \arctan 1
        \ln 2 == \ln(2)
        \ln 4 == 2\ln 2
        \ln\frac{3}{2} == \ln 3-\ln 2
        \ln 2 != 0.69
        3 == \log_2 8
        3 == \log_{10} 1000
        2 == \lg 100
        \log_2 3 == \frac{\ln 3}{\ln 2}
        e^2 == e^{2}
        5 == e^{\ln 5}
        e != 2.718
        -1 == e^{i\pi}
    """,
    "algebra": r"""
        x^2+2x+1 == (x+1)^2
        x^2+2x+1 == x²+2x+1
        x^2+2x+1 == 1+2x+x^2
        x^2-1 == (x-1)(x+1)
        x^2-1 != x^2+1
        2x == x\cdot 2
        2x == x\ast 2
        2n+1 != 2k+1
        ab == ba
        a-b != b-a
        1 == \sin^2 x+\cos^2 x
        2\sin x\cos x == \sin 2x
        x^{-1} == \frac{1}{x}
        |x| == \sqrt{x^2}
        a_{n} == a_n
        a_1+a_2 == a_2+a_1
        x_0 != x_1
        X != x
        \alpha+\beta == \beta+\alpha
        3+4i == 4i+3
        3+4i != 3-4i
        i == \sqrt{-1}
        \frac{n(n+1)}{2} == \frac{n^2+n}{2}
        \sum_{k=1}^{n} k == \frac{n(n+1)}{2}
        6 == \sum_{i=1}^{3} i
        \frac{1}{2} == \int_0^1 x\,dx
        2x == \frac{d}{dx}x^2
        \vec{a}+\vec{b} == \vec{b}+\vec{a}
    """,
    "equations": r"""
        5 == x=5
        x=5 == 5
        x=5 == x = 5
        x=5 == 5=x
        x=5 != x=6
        x=5 != y=5
        5 != x = 6
        5 == x=5\text{ cm}
        5 == x=\boxed{5}
        x^2 == f(x)=x^2
        y=2x+1 == 2x+1
        y=2x+1 == y=1+2x
        y=2x+1 == 2x-y+1=0
        y=2x+1 != y=2x-1
        2x+3y=6 == 4x+6y=12
        x^2+y^2=1 == y^2+x^2-1=0
        x^2+y^2=1 != x^2+y^2=2
        \frac{1}{2} == P(A)=\frac{1}{2}
        \frac{1}{2} == P=\frac{2}{4}=\frac{1}{2}
        12 == 3\cdot4=12
        12 != 3+4=7
        2 != 1=2
        2 != 2=1
        2 != 2\neq 3
        1,2 == x=1, x=2
        x=1 \text{ or } x=2 == 1, 2
        x=1,y=2 == y=2,x=1
        x=1,y=2 != x=2,y=1
        x=1,y=2 != 2,1
        5 == =5
    """,
    "choices and words": r"""
        A == (A)
        A == A.
        A == a
        (A) == A
        \text{A} == A
        \text{(A)} == A
        \textbf{(A)} == A
        C == \mathrm{C}
        A != B
        B == \textbf{(B)}\ 12
        A == \text{Option A}
        \text{even} == even
        \text{Even} == \text{even}
        \text{even} != \text{odd}
        \text{yes} != \text{no}
        \text{Monday} == Monday
        \text{Monday} != \text{Tuesday}
        \text{cat} != \text{act}
        ABCD == \text{ABCD}
        ABCD != DCBA
        10:30 == 10:30
        10:30 != 10:31
        12:00 != 5:00
        1101_2 == 1101_{2}
        2A_{16} != 2B_{16}
        \infty == +\infty
        \infty != -\infty
        \infty != \frac{1}{0}
        \text{none} != 0
        \text{undefined} == \text{undefined}
    """,
    "layout": r"""
        5 == \displaystyle 5
        5 == {5}
        5 == \,5\,
        5 == ~5~
        5 == \ 5
        5 == 5\quad
        5 == \mathbf{5}
        5 == \text{5}
        5 == \phantom{0}5
        5 == \boxed{5}
        5 == \fbox{5}
        5 == (5)
        5 != \mathbf{6}
        6 == 2\cdot 3
        6 == 2\times 3
        6 == 2 × 3
        6 == 2*3
        6 == 2·3
        x+y == x\!+\!y
        5 == \bf 5
        5 == \underline{5}
        5 == \textcolor{red}{5}
    """,
    "no answers": r"""
        2 != \
        2 != }{
        2 != \text{}
        2 != ?
        2 != \ldots
        2 != None
        2 != nan
        2 != not 2
        2 != \neq 2
        2 != \text{2 or 3}
        2 != \text{the answer is } 3
        2 != 2^{}+1
        2 != \frac{1}{0}
        2 != \frac{0}{0}
        2 != 1; 2
        2 != 1, 2, 3, 4
        2 != print(2)
        2 != exec('2')
        2 != lambda: 2
        2 != import os
        2 != __import__('os').system('true')
        2 != {{config}}
        2 != \input{/etc/passwd}
        2 != \write18{true}
        2 != <script>2</script>
        2 != ' OR 1=1 --
    """,
}
KNOWN = {
    # right, but taken for wrong
    r"42 == \text{forty-two}": "words count as words",
}


def pairs(group: str) -> list[str]:
    return [line.strip() for line in PAIRS[group].strip().splitlines()]


def parts(pair: str) -> tuple[str, str, bool]:
    """Truth, answer and whether they are equal."""
    sign = min((sign for sign in (" == ", " != ") if sign in pair), key=pair.index)
    return *pair.split(sign, 1), sign == " == "


def verdict(answer: str, truth: str, seconds: float = 60) -> bool:
    return compute_score("math", rf"so \boxed{{{answer}}}.", truth, timeout_seconds=seconds)["acc"] == 1.0


def test_there_are_enough_pairs_each_once():
    every = [pair for group in PAIRS for pair in pairs(group)]
    assert len(set(every)) == len(every) >= 490
    assert {parts(pair)[2] for pair in every} == {True, False}
    assert KNOWN.keys() <= set(every)


@pytest.mark.parametrize("group", PAIRS)
def test_verdicts_are_those_given_by_hand_but_for_the_known(group):
    with ThreadPoolExecutor(4) as threads:
        verdicts = threads.map(lambda pair: verdict(parts(pair)[1], parts(pair)[0]), pairs(group))
    otherwise = {pair for pair, is_right in zip(pairs(group), verdicts, strict=True) if is_right != parts(pair)[2]}
    assert otherwise == KNOWN.keys() & set(pairs(group))


@pytest.mark.parametrize(
    "answer",
    [
        "9^{9^{9^{9}}}",
        "1e999999999",
        r"\frac{1}{10^{10^{10}}}",
        r"\prod_{n=1}^{99999999} n",
        r"\sqrt{" * 80 + "2" + "}" * 80,
        "{" * 250 + "2" + "}" * 250,
        r"\frac{" * 30,
        "2" * 513,
        "x" * 512,
        "0." + "1" * 480 + r"\overline{1}",
        "１" * 500,
        r"\text{" + "é" * 500 + "}",
        "",
        " ",
        "\x00",
        "\ud800",
        "\u202e3",
        "\u200b",
    ],
    ids=lambda answer: repr(answer[:20]),
)
def test_hostile_answers_are_wrong(answer):
    assert not verdict(answer, "2", seconds=1)


@pytest.mark.parametrize(
    ("response", "truth", "is_right"),
    [
        (r"It is $\boxed{5}$.", "5", True),
        (r"\boxed{\frac{1}{2}}", "0.5", True),
        (r"\boxed{\text{(A)}}", "A", True),
        (r"\boxed{\left\{1,\frac{1}{2}\right\}}", r"\{\frac{1}{2},1\}", True),
        (r"\boxed{ \boxed{5} }", "5", True),
        (r"\boxed {5}", "5", True),
        ("\\boxed{\n5\n}", "5", True),
        ("\\boxed{\\begin{pmatrix}\n1\\\\\n2\n\\end{pmatrix}}", r"\begin{pmatrix}1\\2\end{pmatrix}", True),
        (r"First \boxed{4}, no, \boxed{5}", "5", True),
        (r"First \boxed{5}, no, \boxed{4}", "5", False),
        (r"\boxed{5} and then \boxed{6", "5", True),
        (r"\boxed{5} and then \boxed{}", "5", False),
        (r"\boxed{4} and \boxed{5}", "4,5", False),
        (r"\boxed{5}" + " more text" * 10_000, "5", True),
        (r"x } } \boxed{5} { {", "5", True),
        (r"\boxed{x = 5}", "5", True),
        (r"\boxed{5 \text{ apples}}", "5", True),
        (r"<think>\boxed{4}</think>\boxed{5}", "5", True),
        (r"$$\boxed{\$1{,}250}$$", "1250", True),
        (r"\boxed{\%50}", "50", False),
        ("The answer is 5.", "5", False),
        ("**5**", "5", False),
        ("#### 5", "5", False),
        (r"\boxed 5", "5", False),
        (r"\fbox{5}", "5", False),
        (r"\\boxed{5}", "5", False),
        (r"\boxed{5", "5", False),
        (r"boxed{5}", "5", False),
        (r"\boxed(5)", "5", False),
        ("", "5", False),
        (r"\boxed{\boxed{\boxed{4}}}5", "5", False),
    ],
)
def test_the_answer_is_the_last_closed_box(response, truth, is_right):
    assert (compute_score("math", response, truth, timeout_seconds=60)["acc"] == 1.0) is is_right


@pytest.mark.parametrize(
    ("answer", "spelt"),
    [
        ("（１，２］", "(1,2]"),
        ("¾x²", r"\frac{3}{4}x^{2}"),
        ("2⁻¹⁰", "2^{-10}"),
        (r"\log_2 8", r"\log_2 8"),
        ("1, 2", "1, 2"),
        (r"{10 \choose 3}", r"\binom{10}{3}"),
        (r"\{10, 3\}", r"\{10, 3\}"),
        (r"\hat{\imath}+\vec{k}", r"\mathbf{i}+\mathbf{k}"),
        ("20°C", r"20\text{ celsius}"),
        (r"30^\circ 15'", r"{(30+\frac{15}{60})^\circ}"),
        (r"k\pi, k \text{ is an integer}", r"k\pi, k\in\mathbb{Z}"),
        (r"k\pi, k \text{ is a positive integer}", r"k\pi, k \text{ is a positive integer}"),
        (r"n\pi \text{ for any integer } n", r"n\pi, n\in\mathbb{Z}"),
        (r"12_{\text{seven}}", "12_{7}"),
        ("①③", "①, ③"),
        ("3 to 4", "3:4"),
        ("3 to 4 weeks", "3 to 4 weeks"),
        (r"12.0\overline{45}", r"\frac{11925}{990}"),
        (r".\overline{142857}", r"\frac{142857}{999999}"),
        (r"\overline{AB}", r"\overline{AB}"),
    ],
)
def test_spellings_by_hand(answer, spelt):
    assert common_spelling(without_repeating_decimals(plain_characters(answer))) == spelt
