"""Each benchmark's published layout, with made-up questions, against questions given by hand."""

import pytest

from recipe.tasks.deep_research.reward import rule_of
from tests.evaluation.questions.layouts import LAYOUTS, gaia_row, read, verl_row, write
from tests.tables import table
from verl.evaluation.questions.benchmarks import find_benchmark
from verl.evaluation.questions.loading import REPEATED, read_questions
from verl.evaluation.questions.prompts import BOXED_INSTRUCTION, STYLES, to_messages, tool_instruction
from verl.evaluation.scores.scoring import find_scoring
from verl.utils.parts import parts


def test_the_table_has_every_benchmark_and_no_unknown_words():
    assert parts("evaluation").keys() == LAYOUTS.keys() and len(LAYOUTS) == 24
    for name, benchmark in parts("evaluation").items():
        assert find_scoring(benchmark.scoring).about and benchmark.style in STYLES and benchmark.get
        # the reward in training takes the same side
        is_math = benchmark.scoring == "math"
        made_here = name in ("countdown", "textworld", "walk", "wordproblems", "searchtask", "reasoninggym")
        assert made_here or benchmark.scoring == "code" or (rule_of(name) == "math") == is_math


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_each_published_layout(tmp_path, name, suffix):
    row, number, text, answers = LAYOUTS[name]
    result = read(tmp_path, name, [row], suffix)
    (question,) = result.questions
    assert (question.id, question.answers, result.left_out) == (number, answers, {})
    adds_a_format = name in ("countdown", "code", "humaneval", "mbpp")
    assert question.text.startswith(text) if adds_a_format else question.text == text
    content = f"{text}\n\n{BOXED_INSTRUCTION}" if rule(name) == "math" else question.text
    assert question.prompt[-1] == {"role": "user", "content": content}
    assert (len(question.prompt) == 2) == (find_benchmark(name).style == "answer")


def rule(name: str) -> str:
    return find_benchmark(name).scoring


# ---------------------------------------------------------------- verl's format


@pytest.mark.parametrize(("name", "truth", "answers"), table(__file__, "verls format"))
def test_verls_format(tmp_path, name, truth, answers):
    (question,) = read(tmp_path, name, [verl_row(truth, system="Use tools.")], ".parquet").questions
    assert (question.id, question.text, question.answers) == ("0", "q?", answers)
    assert question.prompt == [{"role": "system", "content": "Use tools."}, {"role": "user", "content": "q?"}]


@pytest.mark.parametrize(
    ("name", "row", "problem"),
    [
        ("math", verl_row(""), "no answer"),
        ("hotpotqa", verl_row([]), "empty list"),
        ("hotpotqa", verl_row(None), "no answer in reward_model.ground_truth"),
        ("countdown", verl_row("{"), "no whole numbers"),
        ("countdown", verl_row({"target": 7.5, "numbers": [3]}), "no whole numbers"),
        ("walk", verl_row({"start": 3, "target": 8, "steps": 1, "operations": ["+5"]}), "limit must be a whole number"),
        ("hotpotqa", verl_row("a") | {"prompt": "q?"}, "no list of messages"),
        ("hotpotqa", verl_row("a", ""), "no message of a user"),
    ],
)
def test_bad_rows_of_verls_format(tmp_path, name, row, problem):
    with pytest.raises(ValueError, match=f"{problem}.*: 1 row.s. 0"):
        read(tmp_path, name, [row])


# ---------------------------------------------------------------- what is left out, chosen, repeated


def test_repeats_are_asked_once_and_ids_belong_to_one_question(tmp_path):
    aime = LAYOUTS["aime24"][0]
    result = read(tmp_path, "aime24", [aime, aime | {"id": 61, "problem": "other?"}, aime, aime])
    assert len(result.questions) == 2 and result.left_out == {REPEATED: 2}
    with pytest.raises(ValueError, match="more than one question has the id 60"):
        read(tmp_path, "aime24", [aime, aime | {"problem": "other?"}])


def test_several_files_are_one_set(tmp_path):
    row = LAYOUTS["math"][0]
    paths = [
        write(tmp_path / subject / "test.jsonl", [row | {"problem": subject}]) for subject in ("algebra", "geometry")
    ]
    result = read_questions("math", paths).questions
    assert [(question.id, question.text) for question in result] == [("0", "algebra"), ("1", "geometry")]


# ---------------------------------------------------------------- what is wrong


@pytest.mark.parametrize("name", LAYOUTS)
def test_another_sets_file_is_told_with_what_was_expected_and_found(tmp_path, name):
    with pytest.raises(ValueError) as raised:
        read(tmp_path, name, [{"Text": "q?", "Label": "a"}, {"more": 1}])
    message = str(raised.value)
    benchmark = find_benchmark(name)
    assert "file.jsonl" in message and benchmark.title in message and "Found: Text, Label, more" in message
    assert all(field in message for field in (*benchmark.question, *benchmark.answer, "reward_model"))


def test_bad_rows_are_named_by_number(tmp_path):
    rows = [gaia_row(0), gaia_row(1, Question=" "), gaia_row(2, **{"Final answer": None}), gaia_row(3), 5]
    with pytest.raises(ValueError) as raised:
        read(tmp_path, "gaia", rows, ".json")
    for part in ("no question in Question: 1 row(s) 1", "no answer in Final answer or answer: 1 row(s) 2"):
        assert part in str(raised.value)
    assert "got int: 1 row(s) 4" in str(raised.value)


def test_wrong_arguments_are_named(tmp_path):
    with pytest.raises(ValueError, match="no benchmark 'gaya': choose one of 2wikimultihopqa, aime24, "):
        read(tmp_path, "gaya", [gaia_row(0)])
    with pytest.raises(ValueError, match="style='box': choose one of boxed"):
        read(tmp_path, "gaia", [gaia_row(0)], style="box")
    with pytest.raises(ValueError, match="gaia: no files; get them from https"):
        read_questions("gaia", [])
    with pytest.raises(ValueError, match="nowhere.jsonl does not exist"):
        read_questions("gaia", [tmp_path / "nowhere.jsonl"])


# ---------------------------------------------------------------- prompts and the command line


def test_prompts_by_style():
    assert to_messages("q?", "plain") == [{"role": "user", "content": "q?"}]
    assert to_messages("q?", "answer", system="Mine.")[0] == {"role": "system", "content": "Mine."}
    assert to_messages("q?", "boxed", system="Mine.")[0] == {"role": "system", "content": "Mine."}
    assert "<search>…</search>" in tool_instruction() and "<python>…</python>" in tool_instruction()
    assert "calls the tool maps" in tool_instruction(["maps"]) and "call tools" not in tool_instruction([])
