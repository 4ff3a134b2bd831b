"""Number walks against a search written the slow way: every sequence of operations, with `eval`."""

import itertools
import json
import random
import re
import time
from collections import Counter

import numpy as np
import pandas as pd
import pytest
from transformers import AutoTokenizer

from recipe.common.tiny_model import make_tokenizer
from recipe.hato.local_reward import Step
from recipe.tasks.walk.data import MODEL, Problem, WalkConfig, can_arrive, ends, main, random_walk, write_walks
from recipe.tasks.walk.reward import apply, check_row, compute_score
from tests.tables import table

CONFIG = WalkConfig(
    train_size=300,
    valid_size=40,
    test_size=50,
    demo_size=600,
    demo_correct=0.5,
    min_steps=3,
    max_steps=5,
    max_operand=5,
    operators="+*-/",
    seed=3,
)


def walks_slowly(start: int, steps: int, operations, limit: int) -> dict[tuple[str, ...], int]:
    """Each possible sequence of operations, and where it ends."""
    possible = {}
    for path in itertools.product(operations, repeat=steps):
        value = start
        for operation in path:
            value = eval(f"{value}{operation}")
            if value != int(value) or not 0 <= value <= limit:
                break
        else:
            possible[path] = int(value)
    return possible


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    paths = write_walks(tmp_path_factory.mktemp("walk"), CONFIG)
    return {split: pd.read_parquet(path) for split, path in paths.items()}


def problems(frame) -> list[Problem]:
    truths = [row["ground_truth"] for row in frame["reward_model"]]
    return [Problem(**truth | {"operations": tuple(truth["operations"])}) for truth in truths]


def shown(text: str) -> tuple:
    """The start, target, steps and operations of a short prompt."""
    start, target, steps, operations = re.fullmatch(r"(\d+)>(\d+) (\d+): (.*)", text).groups()
    return int(start), int(target), int(steps), tuple(operations.split())


def test_splits_are_disjoint_and_of_all_lengths(written):
    assert {name: len(frame) for name, frame in written.items()} == {"train": 300, "valid": 40, "test": 50, "sft": 600}
    splits = {split: set(problems(written[split])) for split in ("train", "valid", "test")}
    assert sum(map(len, splits.values())) == len(set.union(*splits.values())) == 390
    for split in splits:
        prompts = [shown(prompt[0]["content"]) for prompt in written[split]["prompt"]]
        assert prompts == [problem[:4] for problem in problems(written[split])]
        assert {problem.steps for problem in problems(written[split])} == {3, 4, 5}
    held_out = {problem[:4] for split in ("valid", "test") for problem in splits[split]}
    assert not held_out & {shown(messages[0]["content"]) for messages in written["sft"]["messages"]}


def test_targets_can_be_reached_and_only_rarely(written):
    for problem in problems(written["train"])[:60] + problems(written["test"]):
        possible = walks_slowly(problem.start, problem.steps, problem.operations, problem.limit)
        assert ends(problem) == Counter(possible.values())
        share = list(possible.values()).count(problem.target) / len(possible)
        assert 0 < share <= CONFIG.max_share and problem.target != problem.start


def test_walks_are_drawn_evenly_from_all_and_from_the_right_ones():
    problem = Problem(3, 20, 4, ("+5", "*2", "-3"), 40)
    possible = walks_slowly(3, 4, problem.operations, 40)
    right = [path for path, end in possible.items() if end == 20]
    assert 1 < len(right) < len(possible)
    rng = random.Random(0)
    for expected, ends_well in ((possible, False), (right, True)):
        drawn = Counter(
            compute_score("walk", random_walk(problem, ends_well, rng), problem.truth())["pred"]
            for _ in range(50 * len(expected))
        )
        assert set(drawn) == {" ".join(path) for path in expected}
        # 50 of each on average, and the standard deviation is 7
        assert 15 < min(drawn.values()) and max(drawn.values()) < 95


def test_demonstrations_keep_the_rules_and_are_right_as_often_as_asked(written):
    verdicts: dict[int, list[float]] = {}  # number of steps -> verdicts
    for messages in written["sft"]["messages"]:
        start, target, steps, operations = shown(messages[0]["content"])
        truth = {"start": start, "target": target, "steps": steps, "operations": operations, "limit": CONFIG.limit}
        result = compute_score("walk", messages[1]["content"], truth)
        assert result["format"] == 1.0 and 1 <= steps <= 5
        verdicts.setdefault(steps, []).append(result["acc"])
    assert verdicts.keys() == {1, 2, 3, 4, 5}
    long = verdicts[4] + verdicts[5]
    assert 0.4 < sum(long) / len(long) < 0.65  # 0.5, plus walks that end there by chance


def test_long_prompts_ask_for_what_their_demonstrations_do(tmp_path):
    write_walks(tmp_path, WalkConfig(train_size=4, valid_size=0, test_size=0, demo_size=8, style="long"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sft.parquet", "train.parquet"]
    for question, answer in pd.read_parquet(tmp_path / "sft.parquet")["messages"]:
        assert "<answer>" in question["content"] and answer["content"].startswith("<answer>\n")
    (problem, *_) = problems(pd.read_parquet(tmp_path / "train.parquet"))
    answer = f"Well. <answer>\n{random_walk(problem, True, random.Random(0))}\n</answer>"
    assert compute_score("walk", answer, problem.truth())["acc"] == 1.0


def test_a_number_is_a_token_and_a_line_six(tmp_path):
    main(["--model-dir", str(tmp_path)])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer("3*7=21\n21+69=90\n90-9=81").input_ids) == 6 + 6 + 5
    prompt = [{"role": "user", "content": "20>99 6: +9 *3 -9"}]
    assert len(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)) <= 24


TOKENIZER = make_tokenizer(MODEL.max_length, MODEL.extra_words)


def step_of(*texts: str) -> Step:
    """Return a step made of three texts: its problem, what precedes it, and its own."""
    problem, before, tokens = (TOKENIZER.encode(text, add_special_tokens=False) for text in texts)
    return Step(problem=problem, before=before, parent=[], tokens=tokens, decode=TOKENIZER.decode)


def arrives(value, steps, problem):
    """Return whether a walk of this many steps leads from the value to the target, by trying all walks."""
    if steps == 0:
        return value == problem.target
    results = (apply(operation, value, problem.limit) for operation in problem.operations)
    return any(arrives(result, steps - 1, problem) for result in results if result is not None)


def test_a_step_is_worth_something_while_the_target_can_be_reached():
    rng, seen = random.Random(0), Counter()
    for _ in range(60):
        start, target, steps = rng.randint(1, 20), rng.randint(1, 40), rng.randint(2, 4)
        problem = Problem(start, target, steps, ("+1", "*2", "-1"), WalkConfig.limit)
        lines = random_walk(problem, False, rng).splitlines(keepends=True)
        lines[-1] += TOKENIZER.eos_token
        prompt = f"{problem.start}>{problem.target} {problem.steps}: +1 *2 -1"
        for i, line in enumerate(lines):
            reached = int(line.removesuffix(TOKENIZER.eos_token).partition("=")[2])
            expected = arrives(reached, problem.steps - i - 1, problem)
            assert can_arrive(step_of(prompt, "".join(lines[:i]), line)) == expected, (problem, lines, i)
            seen[expected, i + 1 == problem.steps] += 1
    assert len(seen) == 4 and min(seen.values()) >= 3, seen


@pytest.mark.parametrize("walk", ["3*2=7\n", "4*2=8\n", "3*3=9\n", "three\n", "3*2=6\n" + "6-1=5\n5+1=6\n" * 2])
def test_a_broken_rule_is_worth_nothing(walk):
    assert can_arrive(step_of("3>6 4: +1 *2 -1", "", walk)) == 0


TRUTH = {"start": 3, "target": 22, "steps": 4, "operations": ["+5", "*2", "-3"], "limit": 99}
RIGHT = "3*2=6\n6*2=12\n12+5=17\n17+5=22"


def score(answer: str, **options) -> dict:
    return compute_score("walk", answer, TRUTH, **options)


@pytest.mark.parametrize(("answer", "acc", "format_"), table(__file__, "verdicts"))
def test_hand_given_verdicts(answer, acc, format_):
    result = score(answer)
    assert (result["acc"], result["format"], result["score"]) == (acc, format_, float(acc))
    assert score(answer, format_score=0.1)["score"] == (1.0 if acc else 0.1 * format_)


def test_numbers_stay_between_zero_and_the_limit():
    assert compute_score("walk", RIGHT, TRUTH | {"limit": 22})["acc"] == 1.0
    assert compute_score("walk", RIGHT, TRUTH | {"limit": 21})["format"] == 0.0
    assert [apply("*2", value, 10) for value in (5, 6)] == [10, None]
    assert [apply("-3", value, 10) for value in (3, 2)] == [0, None]
    assert [apply("/3", value, 10) for value in (6, 7)] == [2, None] and apply("/0", 6, 10) is None


def test_a_vote_is_the_path_and_broken_walks_do_not_vote():
    assert score(RIGHT)["pred"] == "*2 *2 +5 +5"
    assert score("3+5=8\n8*2=16\n16+5=21\n21-3=18")["pred"] == "+5 *2 +5 -3"
    assert score("3*2=6\n6+5=11\n11*2=22")["pred"] == ""


@pytest.mark.parametrize(
    "response",
    [
        "<answer>" * 200_000,
        "</answer>" * 200_000,
        "<answer>" + "x" * 5_000_000,
        "3*2=6\n" * 1_000_000,
        "9" * 900 + "+" + "9" * 100,
        "\n" * 5_000_000,
        "٣*٢=٦\n" * 4,
        "3*2=6\x00\n6*2=12\n12+5=17\n17+5=22",
        None,
        b"x",
    ],
)
def test_hostile_responses_score_nothing_within_milliseconds(response):
    start = time.thread_time()
    assert score(response)["score"] == 0.0
    assert time.thread_time() - start < 0.05


@pytest.mark.parametrize(("truth", "message"), table(__file__, "refused rows"))
def test_a_row_is_refused_before_a_run_as_it_is_by_the_reward(truth, message):
    for refuse in (lambda: check_row("walk", truth), lambda: compute_score("walk", "3+5=8", truth)):
        with pytest.raises(ValueError, match=message):
            refuse()


def test_good_rows_are_not_refused():
    arrays = TRUTH | {"operations": np.array(TRUTH["operations"]), "target": np.int64(22)}  # types from parquet
    for truth in (TRUTH, arrays, json.dumps(TRUTH), TRUTH | {"start": 3.0}):
        check_row("walk", truth, None, format_score=0.1)
