"""Bad data files and rows are named with file, row and what is wrong, before a run starts."""

from contextlib import nullcontext

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf

from tests.configs import composed
from verl.trainer.checks.preflight import check_batch_sizes, check_files
from verl.trainer.checks.rows import check_data_files, check_reference_answers, check_reward_rows


def good_row() -> dict:
    return {
        "data_source": "countdown",
        "prompt": [{"role": "user", "content": "1 2 3 = 6"}],
        "reward_model": {"style": "rule", "ground_truth": {"target": 6, "numbers": [1, 2, 3]}},
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(({"prompt": prompt}, "column 'prompt' is empty") for prompt in ([], None)),
        *(
            ({"prompt": prompt}, r"column 'prompt' must hold lists of \{role, content\} messages")
            for prompt in (["Q"], [{"from": "user", "value": "Q"}], "Q", [{"role": "user"}], [["Q"]])
        ),
        ({"prompt": [*good_row()["prompt"], {"role": "user"}]}, "column 'prompt': a message has no role or no content"),
        ({"data_source": None}, "column 'data_source' is empty"),
        ({"reward_model": {"style": "rule", "ground_truth": None}}, "reward_model.ground_truth is empty"),
    ],
)
def test_bad_rows_are_named(tmp_path, change, message):
    pd.DataFrame([good_row() | change] * 2).to_parquet(tmp_path / "data.parquet")
    with pytest.raises(ValueError, match=f"data.train_files: .*data.parquet: row 0: {message}"):
        check_data_files("data.train_files", str(tmp_path / "data.parquet"), "prompt")


@pytest.mark.parametrize("column", ["prompt", "data_source", "reward_model"])
def test_missing_columns_are_named(tmp_path, column):
    pd.DataFrame([good_row()]).drop(columns=column).to_parquet(tmp_path / "data.parquet")
    with pytest.raises(ValueError, match=f"data.val_files: .*no column '{column}'"):
        check_data_files("data.val_files", [str(tmp_path / "data.parquet")], "prompt")


def test_a_column_of_the_rollouts_batch_is_named(tmp_path):
    pd.DataFrame([good_row() | {"validate": True}]).to_parquet(tmp_path / "data.parquet")
    with pytest.raises(ValueError, match="has the column 'validate', a name that the rollout uses"):
        check_data_files("data.train_files", str(tmp_path / "data.parquet"), "prompt")


def test_not_a_parquet_file(tmp_path):
    (tmp_path / "data.parquet").write_text("no parquet")
    with pytest.raises(ValueError, match="not a readable parquet file"):
        check_data_files("data.train_files", str(tmp_path / "data.parquet"), "prompt")


def test_rows_of_json_and_of_a_dataset_class_are_left_to_it(tmp_path):
    check_data_files("data.train_files", [str(tmp_path / "rows.jsonl"), "hdfs://rows/a.parquet"], "prompt")
    own = composed("grpo_trainer", "data.custom_cls.path=own.py", f"data.train_files={tmp_path}/rows.txt")
    for check in (check_files, check_reward_rows, check_reference_answers, check_batch_sizes):
        check(own)


def test_good_rows_pass(tmp_path):
    pd.DataFrame([good_row()] * 3).to_parquet(tmp_path / "data.parquet")
    check_data_files("data.train_files", str(tmp_path / "data.parquet"), "prompt")
    # with pictures, a content is a list of parts
    content = [{"type": "text", "text": "What is it?"}]
    pd.DataFrame([good_row() | {"prompt": [{"role": "user", "content": content}]}]).to_parquet(
        tmp_path / "parts.parquet"
    )
    check_data_files("data.train_files", str(tmp_path / "parts.parquet"), "prompt")
    # a call of a tool has no content, where the chat template knows calls
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "search"}]}
    pd.DataFrame([good_row() | {"prompt": [*good_row()["prompt"], call]}]).to_parquet(tmp_path / "calls.parquet")
    check_data_files("data.train_files", str(tmp_path / "calls.parquet"), "prompt")


# ---- the reward is asked ----


def rewards(tmp_path, path: str | None, sources: list[str], truths: list | None = None, **reward_kwargs):
    """The config of a run on rows with these data sources and ground truths, each right answer "2" by default."""
    row = {"prompt": [{"role": "user", "content": "1+1?"}]}
    truths = ["2"] * len(sources) if truths is None else truths
    rows = [
        row | {"data_source": source, "extra_info": {"index": i}, "reward_model": {"ground_truth": truth}}
        for i, (source, truth) in enumerate(zip(sources, truths, strict=True))
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    reward = {"path": path, "name": "compute_score", "reward_kwargs": reward_kwargs}
    files = {"train_files": f"{tmp_path}/rows.parquet", "val_files": [f"{tmp_path}/rows.parquet"]}
    return OmegaConf.create({"reward": {"custom_reward_function": reward}, "data": files, "trainer": {}})


def reward_of(name: str) -> str:
    return "pkg://verl.utils.reward_score.qa" if name == "qa" else f"pkg://recipe.tasks.{name}.reward"


DEEP_RESEARCH = reward_of("deep_research")


def test_a_row_that_no_reward_rule_fits_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"data.train_files: .*rows.parquet: row 2: data_source='my_set'"):
        check_reward_rows(rewards(tmp_path, DEEP_RESEARCH, ["math_dapo", "hotpotqa", "my_set"]))
    check_reward_rows(rewards(tmp_path, DEEP_RESEARCH, ["math_dapo", "hotpotqa", "my_set"], rule="f1"))
    check_reward_rows(rewards(tmp_path, reward_of("word_problems"), ["my_set"]))


def test_a_data_source_that_upstreams_reward_does_not_know_is_named(tmp_path):
    check_reward_rows(rewards(tmp_path, None, ["openai/gsm8k", "math_dapo"]))
    with pytest.raises(ValueError, match="rows.parquet: row 1: .*not implemented for data_source='my_set'"):
        check_reward_rows(rewards(tmp_path, None, ["openai/gsm8k", "my_set"]))


GOOD_TRUTHS = {
    "countdown": '{"target": 6, "numbers": [1, 2, 3]}',
    "walk": '{"start": 3, "target": 8, "steps": 1, "operations": ["+5"], "limit": 99}',
    "textworld": '{"walkthrough": ["look"]}',
    "mathematics": "2",
    "word_problems": "2",
    "qa": "Paris",
    "deep_research": "2",
}


@pytest.mark.parametrize(
    ("reward", "truth", "message"),
    [
        ("countdown", {"target": [6], "numbers": [1, 2, 3]}, "target must be a whole number"),
        ("countdown", {"target": 6, "numbers": []}, "numbers must be a list of whole numbers"),
        ("countdown", {"target": 6, "numbers": [1.5]}, "numbers must be a whole number, got 1.5"),
        ("countdown", {"target": 6, "numbers": [-1]}, "numbers=-1: expected from 0"),
        ("countdown", {"target": 6}, "numbers must be a list"),
        ("walk", {"target": [22]}, "start must be a whole number"),
        *[(reward, truth, "ground_truth") for reward in GOOD_TRUTHS for truth in ("", " ")],
        *[(reward, [], "ground_truth") for reward in GOOD_TRUTHS],
        *[(reward, {"target": [2]}, "ground_truth") for reward in GOOD_TRUTHS],
        ("mathematics", ["2", "3"], "text or a number"),
        ("deep_research", ["2", "3"], "text or a number"),
        ("word_problems", "two", "must be a number"),
        ("qa", ["Paris", ""], "non-empty text"),
    ],
)
def test_a_row_that_the_reward_refuses_for_every_response_is_named(tmp_path, reward, truth, message):
    """Although earlier rows of its data source are good; a column of parquet has one type."""
    truths = [GOOD_TRUTHS[reward]] * 2 * isinstance(truth, str) + [truth]
    source = "qa" if reward == "qa" else "math_dapo"
    config = rewards(tmp_path, reward_of(reward), [source] * len(truths), truths)
    with pytest.raises(ValueError, match=rf"data.train_files: .*rows.parquet: row {len(truths) - 1}: .*{message}"):
        check_reward_rows(config)


def test_a_reward_function_that_does_not_load_is_named(tmp_path):
    for text, message in (("import no_such_module", "no_such_module"), ("x = 1", "has no such function")):
        file = tmp_path / f"reward_{len(text)}.py"
        file.write_text(text)
        with pytest.raises(ValueError, match=f"custom_reward_function.*{message}"):
            check_reward_rows(rewards(tmp_path, str(file), ["my_set"]))


OWN = """
calls = []

def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    assert isinstance(solution_str, str) and set(extra_info) == {"index"} and kwargs == {"weight": 0.5}
    calls.append(data_source)
    open(__file__ + ".calls", "a").write(data_source + " ")
    return {"score": float(ground_truth), "acc": 1.0}
"""


def own_reward(tmp_path, text: str) -> str:
    (tmp_path / "own.py").write_text(text)
    return str(tmp_path / "own.py")


def test_a_reward_function_of_the_users_is_called_once_for_each_data_source(tmp_path):
    path = own_reward(tmp_path, OWN)
    check_reward_rows(rewards(tmp_path, path, ["a", "a", "b", "a"], weight=0.5))
    assert (tmp_path / "own.py.calls").read_text() == "a b a b "  # for the file to train on and that to validate on
    with pytest.raises(ValueError, match=r"data.train_files: .*: row 2: reward.custom_reward_function fails with it"):
        check_reward_rows(rewards(tmp_path, path, ["a", "a", "b"], ["1", "x", "y"], weight=0.5))


FAILING = [
    ("def {}raise KeyError('answer')", "fails with it: KeyError.*trainer.try_reward=false"),
    ("async def {}raise OSError('no judge')", "fails with it: OSError.*no judge"),
    ("def {}return 'good'", "returns 'good', expected a finite number, or a"),
    ("def {}return {{'acc': 1}}", "returns {'acc': 1}, expected"),
    ("async def {}return None", "returns None, expected"),
]


@pytest.mark.parametrize(("text", "message"), FAILING)
def test_a_reward_function_of_the_users_that_fails_is_named(tmp_path, text, message):
    config = rewards(tmp_path, own_reward(tmp_path, text.format("compute_score(**row):\n    ")), ["a"])
    with pytest.raises(ValueError, match=message):
        check_reward_rows(config)
    for change in ({"trainer": {"try_reward": False}}, {"reward": {"reward_model": {"enable": True}}}):
        check_reward_rows(OmegaConf.merge(config, change))  # with a model, whose address nobody knows yet


@pytest.mark.parametrize("returns", ["1.0", '{"score": 1.0}', None])
def test_a_metric_of_the_group_filter_that_the_reward_does_not_return_is_named(tmp_path, returns):
    """None: a reward of ours, whose rows are checked by its module."""
    own = (
        own_reward(tmp_path, f"def compute_score(**row):\n    return {returns}")
        if returns
        else reward_of("mathematics")
    )
    config = rewards(tmp_path, own, ["math_dapo"])
    config.algorithm = {"filter_groups": {"enable": True, "metric": "rewards"}}
    with pytest.raises(ValueError, match="row 0: .*algorithm.filter_groups.metric also needs rewards"):
        check_reward_rows(config)
    config.algorithm.filter_groups.metric = {"1.0": "acc", '{"score": 1.0}': "score", None: "acc"}[returns]
    check_reward_rows(config)


ALARM = "import signal\n\ndef limit():\n    signal.signal(signal.SIGALRM, print)\n    signal.alarm(1)\n\n"
CAUGHT = "def compute_score(**row):\n    try:\n        {}\n        return 1\n    except ValueError:\n        return 0"
CALLED = [
    ("class R:\n    async def __call__(self, **row):\n        return 1\n\ncompute_score = R()", "a coroutine"),
    ("async def judge(row):\n    return 1\n\ndef compute_score(**row):\n    return judge(row)", "a coroutine, and"),
    (ALARM + "def compute_score(**row):\n    limit()\n    return 1", "signal only works in main thread"),
    (ALARM + CAUGHT.format("limit()"), "sets a handler of SIGALRM, .* may get 0"),
    ("import math_verify\n\n" + CAUGHT.format("math_verify.verify(1, 1)"), "sets a handler of SIGALRM"),
    ("def compute_score(**row):\n    return 0.5", None),
    ("async def compute_score(**row):\n    return 1", None),
]


@pytest.mark.parametrize(("text", "message"), CALLED)
def test_a_reward_is_tried_as_a_run_calls_it(tmp_path, text, message):
    """Each of them scores in a main thread without an event loop."""
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        check_reward_rows(rewards(tmp_path, own_reward(tmp_path, text), ["a"]))


def test_a_number_that_the_credit_needs_beside_the_score_is_named(tmp_path):
    """A single number is its own acc: upstream's reward manager adds it."""

    def config(returned: str):
        text = f"def compute_score(**row):\n    return {returned}"
        return OmegaConf.merge(
            rewards(tmp_path, own_reward(tmp_path, text), ["a"]), {"algorithm": {"adv_estimator": "passk"}}
        )

    with pytest.raises(
        ValueError, match="row 0: .* returns {'score': 1}, but .*adv_estimator=passk also needs acc; .*"
    ):
        check_reward_rows(config("{'score': 1}"))
    validated = OmegaConf.merge(config("{'score': 1}"), {"data": {"train_files": []}})
    check_reward_rows(validated)  # nothing is trained on these rows
    check_reward_rows(config("{'score': 0.5, 'acc': 1}"))
    check_reward_rows(config("1"))
    grpo = OmegaConf.merge(config("{'score': 1}"), {"algorithm": {"adv_estimator": "grpo"}})
    check_reward_rows(grpo)


def test_a_check_of_the_users_sees_every_row_in_place_of_the_call(tmp_path):
    check = "def check_row(data_source, extra_info, weight=1.0, **row):\n"
    check += "    if extra_info['index'] == 3 and weight:\n        raise ValueError(row['ground_truth'] + ' is odd')\n"
    path = own_reward(tmp_path, check + "def compute_score(**row):\n    raise KeyError\n")
    with pytest.raises(ValueError, match="rows.parquet: row 3: 7 is odd"):
        check_reward_rows(rewards(tmp_path, path, ["a"] * 5, ["1", "2", "3", "7", "9"]))
    check_reward_rows(rewards(tmp_path, path, ["a"] * 5, ["1", "2", "3", "7", "9"], weight=0))


# ---- long prompts ----


def test_a_row_without_a_reference_answer_is_named_where_one_is_needed(tmp_path):
    file = str(tmp_path / "data.parquet")
    answer = good_row() | {"reward_model": {"style": "rule", "ground_truth": "42"}}
    task = answer | {"reward_model": {"style": "rule", "ground_truth": '{"target": 6, "numbers": [1]}'}}
    pd.DataFrame([answer, task]).to_parquet(file)
    check_reference_answers(composed("explore", f"data.train_files={file}"))
    config = composed("explore", f"data.train_files={file}", "credit=igpo")
    with pytest.raises(ValueError, match="data.train_files: .*row 1: .*igpo: .* no reference"):
        check_reference_answers(config)
    pd.DataFrame([answer, answer]).to_parquet(file)
    check_reference_answers(config)
