"""Verifiers of reasoning-gym: right answers have 1 from rows of JSON, hostile ones 0 within the time limit."""

import json
import math
import re
import time
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf

from recipe.tasks.reasoning_gym import reward
from recipe.tasks.reasoning_gym.data import ReasoningGymConfig, draw_problems, write_reasoning_gym
from recipe.tasks.reasoning_gym.families import FORMULAS, REFUSED, check_families, is_allowed, library
from recipe.tasks.reasoning_gym.worker import LITERALS
from tests.fresh import output_of, python_for
from tests.tables import table

ROOT = Path(__file__).resolve().parents[4]
WITHOUT_ANSWERS = {"boxnet", "graph_color", "rubiks_cube", "rush_hour"}
# knight_swap takes seconds per problem
FAMILIES = sorted(set(library().DATASETS) - set(REFUSED) - WITHOUT_ANSWERS - {"knight_swap"})


CHAIN = {"family": "chain_sum", "config": {}, "answer": "12", "metadata": {}}


def problems_of(family: str, size: int) -> list:
    return draw_problems(ReasoningGymConfig(families=family, family_config=""), "test", size, set())


def score(truth: str, response: str, **kwargs) -> dict:
    return reward.compute_score("reasoning_gym", response, truth, **kwargs)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_answer_of_each_family_is_right_and_another_is_not(family):
    for problem in problems_of(family, 3):
        reward.check_row("reasoning_gym", problem.truth)
        assert score(problem.truth, f"I think so. <answer>{problem.answer}</answer>")["acc"] == 1.0
        assert score(problem.truth, "<answer>no such answer</answer>")["acc"] == 0.0


def test_a_thread_waits_for_the_import_of_another():
    """A reward worker scores in several threads, and its first answers import the library at once."""
    code = """
import sys, threading, time
from recipe.tasks.reasoning_gym.families import check_families
threading.Thread(target=__import__, args=["reasoning_gym"]).start()
while "reasoning_gym.factory" not in sys.modules:
    time.sleep(0.001)
print(check_families(["spell_backward"]))
"""
    assert output_of(python_for(code), cwd=ROOT) == "['spell_backward']\n"


def test_answers_are_found_between_tags_in_a_box_or_alone():
    truth = json.dumps(CHAIN)
    for response in ("<answer>3</answer> <answer> 12 </answer>", r"so \boxed{12}", " 12\n", "<answer>+12.0</answer>"):
        assert score(truth, response)["acc"] == 1.0
    partial = score(truth, "<answer>12 or 13</answer>")
    assert (partial["acc"], partial["score"]) == (0.0, 2 / 8)
    assert score(truth, "<answer></answer> 12") == {"score": 0.0, "acc": 0.0, "pred": ""}


@pytest.mark.parametrize("family", [*FORMULAS, *LITERALS, "bitwise_arithmetic", "codeio", "list_functions", "bf"])
def test_a_program_as_answer_does_not_run(family, tmp_path):
    (problem,) = problems_of(family, 1)
    marker = tmp_path / "marker"
    for program in (f"__import__('os').system('touch {marker}')", f"open({str(marker)!r}, 'w').close()"):
        for answer in (program, f"[{program}]", f"({program} or 1)*1"):
            assert score(problem.truth, f"<answer>{answer}</answer>")["acc"] == 0.0
    assert not marker.exists()


def test_lists_are_read_and_not_run():
    truth = json.dumps({"family": "spiral_matrix", "config": {}, "answer": "1 2 3", "metadata": {}})
    assert score(truth, "<answer>[1, 2, 3]</answer>")["score"] == 0.1
    assert score(truth, "<answer>[x for x in (1, 2, 3)]</answer>")["score"] == 0.0


@pytest.mark.parametrize("family", FORMULAS)
def test_formulas_name_nothing_of_python(family):
    assert is_allowed(family, "2*x**3/4 + 1.5*(x - 1)") and not is_allowed(family, "x" * 20_000)
    names = ("x.real", "__x__", "open(1)", "S(1)", "1.e", "lambda: 1", "(x:=1)", "x if x else y")
    for text in (*names, "'1'", "[1]", "x\n"):
        assert not is_allowed(family, text)


def test_the_process_of_the_verifiers_is_confined(tmp_path):
    # its own rows are run by this verifier: the second wall behind the checks of answers
    marker = tmp_path / "marker"
    for program in (f"__import__('os').system('touch {marker}')", f"open({str(marker)!r}, 'w').close()"):
        row = {"answer": "0x1", "metadata": {"problem": program}}
        assert score(json.dumps({"family": "bitwise_arithmetic", "config": {}, **row}), "0x1")["acc"] == 0.0
    assert not marker.exists()


@pytest.mark.parametrize(
    "answer", ["9**9**9", "9**9**9**9*9", "1" * 50 + "x" * 50 + "!", "1" * 10**6, "(" * 5000 + "1" + ")" * 5000]
)
@pytest.mark.parametrize("family", ["countdown", "polynomial_multiplication", "chain_sum", "n_queens"])
def test_an_endless_or_huge_answer_has_no_point_within_the_limit(family, answer):
    (problem,) = problems_of(family, 1)
    reward.verify("chain_sum", {}, {"answer": "1", "metadata": {}}, "1")  # the process has started
    started = time.monotonic()
    assert score(problem.truth, f"<answer>{answer}</answer>", timeout_seconds=1.0)["acc"] == 0.0
    assert time.monotonic() - started < 4.0
    assert score(problem.truth, f"<answer>{problem.answer}</answer>", timeout_seconds=60.0)["acc"] == 1.0


@pytest.mark.parametrize("answer", ["(6+61+94+4)*0e1+309e0", "3.25*4", "x/x+x/x", "2**3", "7//2", "1_0"])
def test_countdown_reads_whole_numbers_and_four_signs_only(answer):
    assert not is_allowed("countdown", answer) and is_allowed("countdown", "-(6 + 61)*94/4")


def test_a_distance_of_nan_is_no_right_answer():
    (problem,) = problems_of("complex_arithmetic", 1)
    assert [score(problem.truth, f"<answer>{answer}</answer>")["score"] for answer in ("nan", "NaN + 1j")] == [0, 0]


@pytest.mark.parametrize(("change", "message"), table(__file__, "refused rows"))
def test_refused_rows(change, message):
    with pytest.raises(ValueError, match=message):
        reward.check_row("reasoning_gym", json.dumps(CHAIN | change))


def test_rows_of_other_families_than_the_configs_are_refused():
    config = OmegaConf.load(Path(reward.__file__).with_name("task.yaml"))
    config.task.families = ["gcd"]
    assert config.reward.custom_reward_function.reward_kwargs.families == ["gcd"]
    truth = json.dumps(CHAIN)
    reward.check_row("reasoning_gym", truth, families=["chain_sum", "gcd"])
    with pytest.raises(ValueError, match="not in task.families"):
        reward.check_row("reasoning_gym", truth, families=["gcd"])
    with pytest.raises(ValueError, match="did you mean knights_knaves"):
        check_families(["knight_knaves"])


SMALL = ReasoningGymConfig(train_size=60, test_size=20, demo_size=40)


def test_no_test_question_is_in_another_file(tmp_path):
    # 200 questions at most: train would have some of the test's
    config = replace(SMALL, families="chain_sum", demo_size=400)
    config = replace(config, family_config="chain_sum: {min_terms: 2, max_terms: 2, max_digits: 1}")
    rows = {split: pq.read_table(path).to_pylist() for split, path in write_reasoning_gym(tmp_path, config).items()}
    asked = {split: [row["prompt"][0]["content"] for row in rows[split]] for split in ("train", "test")}
    shown = {row["messages"][0]["content"] for row in rows["sft"]}
    assert len(set(asked["test"])) == 20 and len(set(asked["train"])) == 60
    assert not set(asked["test"]) & (set(asked["train"]) | shown)


def test_families_take_turns_with_their_settings(tmp_path):
    config = replace(
        SMALL, families="gcd, chain_sum", family_config="chain_sum: {min_terms: 3, max_terms: 3}", style="long"
    )
    rows = pq.read_table(write_reasoning_gym(tmp_path, config)["train"]).to_pylist()
    truths = [json.loads(row["reward_model"]["ground_truth"]) for row in rows]
    assert [truth["family"] for truth in truths] == ["gcd", "chain_sum"] * 30
    assert all(truth["metadata"]["num_terms"] == 3 for truth in truths[1::2])
    assert all("<answer>" in row["prompt"][0]["content"] for row in rows)


def test_answers_of_other_problems_are_the_wrong_demonstrations(tmp_path):
    config = replace(SMALL, families="gcd", family_config="", demo_correct=0.0, demo_size=200)
    right = 0
    for row in pq.read_table(write_reasoning_gym(tmp_path, config)["sft"]).to_pylist():
        question, answer = (message["content"] for message in row["messages"])
        right += answer == f"<answer>{math.gcd(*map(int, re.findall(r'[0-9]+', question)))}</answer>"
    assert 0 < right < 150  # two problems may have the same answer


@pytest.mark.parametrize(("option", "value", "message"), table(__file__, "wrong options are named"))
def test_wrong_options_are_named(option, value, message):
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **{option: value})


def test_demonstrations_need_answers(tmp_path):
    with pytest.raises(ValueError, match="rush_hour has no answers"):
        write_reasoning_gym(tmp_path, replace(SMALL, families="rush_hour"))
