"""The evaluator's numbers from answers given by hand; generation itself is vLLM's."""

import runpy
from pathlib import Path

import pytest

SCRIPT = runpy.run_path(str(Path(__file__).resolve().parents[2] / "scripts/evaluate_countdown.py"))
measure, checkpoint_model = SCRIPT["measure"], SCRIPT["checkpoint_model"]

TRUTHS = [{"target": 14, "numbers": [2, 3, 4]}, {"target": 9, "numbers": [2, 3, 4]}]


def sample(expression: str, length: int) -> tuple[str, int]:
    return f"<answer>{expression}</answer>", length


def test_mean_best_and_majority_by_hand():
    samples = [
        # two right, one that misses, one that breaks the rules: the right value wins the vote
        [sample("3*4+2", 5), sample("2+4*3", 5), sample("2+3+4", 7), sample("7+7", 3)],
        # one right, two that agree on 24: the vote goes wrong
        [sample("2+3+4", 5), sample("2*3*4", 5), sample("4*3*2", 5), ("no answer", 5)],
    ]
    found = measure(samples, TRUTHS)
    assert found == {
        "Acc-Pass@1": pytest.approx((2 / 4 + 1 / 4) / 2),
        "Acc-Mean@4": pytest.approx((2 / 4 + 1 / 4) / 2),
        "Acc-Best@4": 1.0,
        "Acc-Maj@4": 0.5,
        "Response-Length-Mean": pytest.approx(5.0),
    }


def test_no_votes_is_a_wrong_vote():
    found = measure([[("nothing", 1), ("nothing", 1)]], TRUTHS[:1])
    assert found["Acc-Maj@2"] == found["Acc-Best@2"] == 0.0


def test_an_experiment_without_complete_checkpoint_is_an_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs/run/global_step_5/actor").mkdir(parents=True)
    with pytest.raises(SystemExit, match="no complete checkpoint"):
        checkpoint_model("run", None)
