"""Tests of what the reward for mathematics reads in a response, and of the time that hostile answers take."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.tables import table
from verl.utils.math_answers import comparison
from verl.utils.math_answers.comparison import compute_score, last_boxed
from verl.utils.math_answers.latex_spelling import common_spelling, plain_characters, without_repeating_decimals
from verl.utils.process_pool import ProcessPool

POWERS = r"9^{9^{9^{9}}}"


def accuracy(answer: str, truth: str, **options) -> float:
    result = compute_score("math", rf"so \boxed{{{answer}}}.", truth, **options)
    assert result["score"] == result["acc"]
    return result["acc"]


@pytest.fixture
def no_processes(monkeypatch):
    def refuse(*args):
        raise AssertionError(f"compared {args}")

    monkeypatch.setattr(comparison, "is_equivalent", refuse)


@pytest.mark.parametrize("answer", ["7", "1.0", r"\frac{14}{2}", " ", "\x00", "\ud800"])
def test_a_number_may_be_the_ground_truth_and_texts_that_are_no_answers_are_wrong(answer):
    assert accuracy(answer, 7) == (answer in ("7", r"\frac{14}{2}"))


@pytest.mark.parametrize(
    ("text", "content"),
    [
        *table(__file__, "boxes"),
        (r"\boxed{5}" + " more text" * 10_000, "5"),
        *((text, None) for text in (r"\boxed 5", r"\\boxed{5}", r"\boxed{5", "boxed{5}", r"\boxed(5)", r"\fbox{5}")),
        *((text, None) for text in ("", "5", "The answer is 5.", "**5**", "#### 5")),
    ],
)
def test_the_answer_is_in_the_last_closed_box(text, content):
    assert last_boxed(text) == content


def test_no_box_is_wrong_and_has_no_vote(no_processes):
    for response in ("5", r"\boxed{5", "", None, b"5"):
        assert compute_score("math", response, "5") == {"score": 0.0, "acc": 0.0, "pred": ""}


@pytest.mark.parametrize("answer", [r"\dfrac{1}{2}", r" \frac{1} {2}. ", r"$\tfrac{1}{2}$", r"\frac{1}{2}\,"])
def test_the_same_text_needs_no_comparison_and_votes_together(no_processes, answer):
    assert compute_score("math", rf"\boxed{{{answer}}}", r"\frac{1}{2}") == {
        "score": 1.0,
        "acc": 1.0,
        "pred": r"\frac{1}{2}",
    }


SPELLINGS = Path(__file__).with_name("spellings.txt").read_text(encoding="utf-8").splitlines()[1:]


@pytest.mark.parametrize(("answer", "spelt"), [line.split(" -> ") for line in SPELLINGS])
def test_spellings_by_hand(answer, spelt):
    assert common_spelling(without_repeating_decimals(plain_characters(answer))) == spelt


@pytest.mark.parametrize("truth", ["", " ", None, [1]])
def test_an_empty_ground_truth_is_an_error(truth):
    with pytest.raises(ValueError, match="ground_truth of a math problem"):
        accuracy("5", truth)


@pytest.mark.slow
@pytest.mark.parametrize(
    "answer",
    [
        POWERS,
        r"\sqrt{" * 5000 + "2" + "}" * 5000,
        "99999999999!",
        r"\sum_{n=1}^{99999999999} \sin(n^n)",
        r"\int_0^1 \sin(x^x) e^{\cos(x)^x} dx",
        "+".join(f"x_{i}" for i in range(100)),
        "1e999999999",
        r"\frac{1}{10^{10^{10}}}",
        r"\frac{" * 30,
        "2" * 513,
        "0." + "1" * 480 + r"\overline{1}",
        "１" * 500,
        r"\text{" + "é" * 500 + "}",
        *("", "\u202e3", "\u200b"),
    ],
    ids=lambda answer: repr(answer[:20]),
)
def test_hostile_answers_are_wrong_within_the_limit_and_later_calls_are_right(answer):
    accuracy("0.5", r"\frac{1}{2}")  # a process is there
    start = time.perf_counter()
    assert accuracy(answer, "2", timeout_seconds=2) == 0.0
    assert time.perf_counter() - start < 6
    assert accuracy("0.5", r"\frac{1}{2}") == 1.0


@pytest.mark.parametrize("response", [r"\boxed{" * 200_000, "{" * 1_000_000, "\\" * 1_000_001, "}" * 1_000_000])
def test_hostile_responses_are_read_in_linear_time(response):
    start = time.perf_counter()
    assert compute_score("math", response, "5")["score"] == 0.0
    assert time.perf_counter() - start < 5


def test_threads_share_the_processes():
    """More threads than processes, hostile answers among them: every verdict is its own answer's."""
    answers = ["0.5", "0.25", POWERS, "2/4", "3/4", "4/8"]
    with ThreadPoolExecutor(6) as threads:
        scores = list(threads.map(lambda answer: accuracy(answer, r"\frac{1}{2}", timeout_seconds=2), answers))
    assert scores == [1.0, 0.0, 0.0, 1.0, 0.0, 1.0]


def test_a_forked_process_has_its_own_comparers():
    assert accuracy("0.5", r"\frac{1}{2}") == 1.0
    child = os.fork()
    if not child:
        os._exit(0 if all(slot is None for slot in comparison._POOL.slots.queue) else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.slow
def test_no_process_is_left_behind():
    code = (
        "from verl.utils.math_answers.comparison import _POOL, is_equivalent; is_equivalent('1', '2');"
        "print(*(slot.process.pid for slot in _POOL.slots.queue if slot))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 1, done.stderr
    deadline = time.monotonic() + 10
    while os.path.exists(f"/proc/{pids[0]}") and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not os.path.exists(f"/proc/{pids[0]}")


def test_a_worker_that_does_not_start_is_an_error_not_a_zero(tmp_path):
    (tmp_path / "worker.py").write_text("raise ModuleNotFoundError('mpmath')")
    with pytest.raises(RuntimeError, match="does not start"):
        ProcessPool("mathematics", str(tmp_path / "worker.py")).ask(["1", "2"], 1.0)
