"""Each benchmark's published layout, with made-up questions, against questions given by hand."""

import base64
import csv
import json
import random

import pandas as pd
import pytest

from recipe.tasks.countdown import reward as countdown
from recipe.tasks.countdown.data import CountdownConfig, write_countdown
from recipe.tasks.deep_research import reward as deep_research
from recipe.tasks.deep_research.reward import rule_of
from recipe.tasks.walk.data import Problem, WalkConfig, random_walk, write_walks
from recipe.tasks.word_problems.data import WordProblemsConfig, write_word_problems
from verl.evaluation.__main__ import main
from verl.evaluation.questions.benchmarks import BENCHMARKS, SCORINGS, find_benchmark
from verl.evaluation.questions.loading import BAD, REPEATED, read_questions
from verl.evaluation.questions.prompts import BOXED_INSTRUCTION, STYLES, to_messages, tool_instruction
from verl.evaluation.scores.scoring import by_rule
from verl.utils.reward_score.tool_format import check_format

# name -> (row as published, id, question, answers)
LAYOUTS = {
    "aime24": ({"id": 60, "problem": "p?", "solution": "s", "answer": "204", "url": "u"}, "60", "p?", ["204"]),
    "aime25": ({"problem_idx": 1, "answer": 70, "problem": "p?", "problem_type": ["x"]}, "1", "p?", ["70"]),
    "math500": (
        {
            "problem": "p?",
            "solution": "s",
            "answer": r"\frac{1}{2}",
            "subject": "Algebra",
            "unique_id": "test/a/1.json",
        },
        "test/a/1.json",
        "p?",
        [r"\frac{1}{2}"],
    ),
    "gsm8k": ({"question": "How many?", "answer": "40*27=1080\n#### 1,080"}, "0", "How many?", ["1080"]),
    "math": ({"problem": "p?", "level": "Level 5", "solution": r"so \boxed{7}."}, "0", "p?", ["7"]),
    "webwalkerqa": (
        {"question": "q?", "answer": "a", "root_url": "u", "info": {"lang": "en", "golden_path": ["r->s"]}},
        "0",
        "q?",
        ["a"],
    ),
    "hotpotqa": ({"_id": "5a", "question": "q?", "answer": "yes", "context": {"title": ["t"]}}, "5a", "q?", ["yes"]),
    "2wikimultihopqa": ({"_id": "88", "question": "q?", "answer": "Ann", "answer_id": "Q7"}, "88", "q?", ["Ann"]),
    "musique": (
        {"id": "2hop_1", "question": "q?", "answer": "Ann", "answer_aliases": ["Anna", "Ann"], "answerable": True},
        "2hop_1",
        "q?",
        ["Ann", "Anna"],
    ),
    "bamboogle": ({"Question": "q?", "Answer": "a"}, "0", "q?", ["a"]),
    "gaia": (
        {"task_id": "c6", "Question": "q?", "Level": 2, "Final answer": "[1, 2]", "file_name": ""},
        "c6",
        "q?",
        ["[1, 2]"],
    ),
    "hle": ({"id": "67", "question": "q?", "image": "", "answer": "B", "answer_type": "mc"}, "67", "q?", ["B"]),
    "xbench": ({"id": "1", "prompt": "KSs=", "answer": "cnA=", "canary": "AB"}, "1", "hi", ["32"]),
    "countdown": (
        {"nums": [3, 4], "target": 7},
        "0",
        "Reach 7 with the numbers 3, 4.",
        ['{"target": 7, "numbers": [3, 4]}'],
    ),
    "walk": (
        {"start": 3, "target": 8, "steps": 1, "operations": ["+5", "*2"], "limit": 99},
        "0",
        "Start at 3 and reach 8 in exactly 1 steps. Each step is one of the operations +5 *2",
        ['{"start": 3, "target": 8, "steps": 1, "limit": 99, "operations": ["+5", "*2"]}'],
    ),
    "wordproblems": ({"question": "3 + 4?", "answer": 7}, "0", "3 + 4?", ["7"]),
    "searchtask": ({"question": "bo + ta?", "answer": "10"}, "0", "bo + ta?", ["10"]),
    "amc23": ({"id": 0, "question": "p?", "answer": 27.0, "url": "u"}, "0", "p?", ["27"]),
    "olympiadbench": (
        {"id": 1606, "question": "p?", "context": "c.", "final_answer": ["$2$", "$-2$"], "image_1": None},
        "1606",
        "c.\np?",
        ["2, -2"],
    ),
}


def write(path, rows: list[dict]):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pd.DataFrame(rows).to_parquet(path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8-sig") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        path.write_text(json.dumps(rows))
    return path


def read(tmp_path, name: str, rows: list[dict], suffix: str = ".jsonl", **options):
    return read_questions(name, [write(tmp_path / f"file{suffix}", rows)], **options)


def test_the_table_has_every_benchmark_and_no_unknown_words():
    assert BENCHMARKS.keys() == LAYOUTS.keys() and len(BENCHMARKS) == 19
    for name, benchmark in BENCHMARKS.items():
        assert benchmark.scoring in SCORINGS and benchmark.style in STYLES and benchmark.get
        # the reward in training takes the same side
        is_math = benchmark.scoring == "math"
        made_here = name in ("countdown", "walk", "wordproblems", "searchtask")
        assert made_here or (rule_of(name) == "math") == is_math


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_each_published_layout(tmp_path, name, suffix):
    row, number, text, answers = LAYOUTS[name]
    result = read(tmp_path, name, [row], suffix)
    (question,) = result.questions
    assert (question.id, question.answers, result.left_out) == (number, answers, {})
    assert question.text.startswith(text) if name in ("countdown", "walk") else question.text == text
    user = question.prompt[-1]
    assert user == {
        "role": "user",
        "content": f"{text}\n\n{BOXED_INSTRUCTION}" if rule(name) == "math" else question.text,
    }
    assert (len(question.prompt) == 2) == (find_benchmark(name).style == "answer")


def rule(name: str) -> str:
    return find_benchmark(name).scoring


# ---------------------------------------------------------------- verl's format


def verl_row(truth, content: str = "q?", system: str | None = None) -> dict:
    system_message = [{"role": "system", "content": system}] if system else []
    return {
        "data_source": "x",
        "prompt": [*system_message, {"role": "user", "content": content}],
        "reward_model": {"style": "rule", "ground_truth": truth},
    }


@pytest.mark.parametrize(
    ("name", "truth", "answers"),
    [
        ("math500", "[0,1)", ["[0,1)"]),
        ("gsm8k", "72", ["72"]),
        ("aime24", 204, ["204"]),
        ("hotpotqa", '["Ann", "Anna"]', ["Ann", "Anna"]),
        ("musique", ["Ann", "Anna"], ["Ann", "Anna"]),
        ("bamboogle", {"target": ["Ann"]}, ["Ann"]),
        ("countdown", {"target": 7, "numbers": [3, 4]}, ['{"target": 7, "numbers": [3, 4]}']),
        ("countdown", '{"target": 7, "numbers": [3, 4]}', ['{"target": 7, "numbers": [3, 4]}']),
    ],
)
def test_verls_format(tmp_path, name, truth, answers):
    (question,) = read(tmp_path, name, [verl_row(truth, system="Use tools.")], ".parquet").questions
    assert (question.id, question.text, question.answers) == ("0", "q?", answers)
    assert question.prompt == [{"role": "system", "content": "Use tools."}, {"role": "user", "content": "q?"}]


def test_the_instruction_of_training_data_is_not_the_question(tmp_path):
    (question,) = read(tmp_path, "math", [verl_row("1", f"p?\n\n{BOXED_INSTRUCTION}")]).questions
    assert question.text == "p?" and question.prompt[-1]["content"] == f"p?\n\n{BOXED_INSTRUCTION}"


@pytest.mark.parametrize(
    ("name", "row", "problem"),
    [
        ("math", verl_row(""), "no answer"),
        ("hotpotqa", verl_row([]), "empty list"),
        ("hotpotqa", verl_row(None), "no answer in reward_model.ground_truth"),
        ("countdown", verl_row("{"), "no whole numbers"),
        ("countdown", verl_row({"target": 7.5, "numbers": [3]}), "no whole numbers"),
        ("walk", verl_row({"start": 3, "target": 8, "steps": 1, "operations": ["+5"]}), "no whole numbers"),
        ("hotpotqa", verl_row("a") | {"prompt": "q?"}, "no list of messages"),
        ("hotpotqa", verl_row("a", ""), "no message of a user"),
    ],
)
def test_bad_rows_of_verls_format(tmp_path, name, row, problem):
    with pytest.raises(ValueError, match=f"{problem}.*: 1 row.s. 0"):
        read(tmp_path, name, [row])


def test_countdown_as_our_training_data(tmp_path):
    paths = write_countdown(tmp_path, CountdownConfig(train_size=0, demo_size=0, test_size=8))
    result = read_questions("countdown", [paths["test"]]).questions
    assert len(result) == 8
    numbers, target = json.loads(result[0].answers[0])["numbers"], json.loads(result[0].answers[0])["target"]
    assert result[0].text == f"{' '.join(map(str, numbers))} = {target}"
    assert countdown.compute_score("countdown", "<answer>1</answer>", result[0].answers[0])["acc"] == 0.0


def test_number_walks_as_our_training_data(tmp_path):
    paths = write_walks(tmp_path, WalkConfig(train_size=0, valid_size=0, demo_size=0, test_size=8))
    questions = read_questions("walk", [paths["test"]]).questions
    assert len(questions) == 8 and not set(paths) & {"train", "sft"}
    truth = json.loads(questions[0].answers[0])
    assert questions[0].text == f"{truth['start']}>{truth['target']} {truth['steps']}: {' '.join(truth['operations'])}"
    right = random_walk(Problem(**truth), True, random.Random(0))
    assert by_rule("walk", questions[0], right).score == 1.0
    assert by_rule("walk", questions[0], right + "0") == (0.0, "", {})


def test_word_problems_as_our_training_data(tmp_path):
    paths = write_word_problems(tmp_path, WordProblemsConfig(train_size=0, valid_size=0, test_size=8))
    questions = read_questions("wordproblems", [paths["test"]]).questions
    assert len(questions) == 8 and set(paths) == {"test"}
    truth = int(questions[0].answers[0])
    assert by_rule("number", questions[0], f"So it is 2 + 2 = {truth}.") == (1.0, str(truth), {})
    assert by_rule("number", questions[0], f"{truth} or {truth + 1}").score == 0.0


# ---------------------------------------------------------------- what is left out, chosen, repeated


def gaia_row(number: int, **fields) -> dict:
    row = {"task_id": f"t{number}", "Question": f"q{number}?", "Level": 1, "Final answer": "a", "file_name": ""}
    return row | fields


def test_what_a_model_of_text_cannot_answer_is_counted(tmp_path):
    rows = [gaia_row(0), gaia_row(1, file_name="x.pdf"), gaia_row(2)]
    result = read(tmp_path, "gaia", rows)
    assert [question.id for question in result.questions] == ["t0", "t2"]
    for unknown in ({"Final answer": "?"}, {"Final answer": " ?"}, {"Final answer": "", "answer": "?"}):
        with pytest.raises(ValueError, match="no questions to ask.*no public answer: use the validation split': 1"):
            read(tmp_path, "gaia", [gaia_row(0, **unknown)])
    assert result.left_out == {"comes with a file": 1}
    hle = LAYOUTS["hle"][0]
    result = read(tmp_path, "hle", [hle, hle | {"id": "68", "image": "data:image/png;base64,AA"}])
    assert result.left_out == {"needs an image": 1} and len(result.questions) == 1
    olympiad = LAYOUTS["olympiadbench"][0]
    rows = [olympiad, olympiad | {"id": 1, "image_1": "bytes"}, olympiad | {"id": 2, "modality": "Multimodal"}]
    assert read(tmp_path, "olympiadbench", rows).left_out == {"needs an image": 2}
    musique = LAYOUTS["musique"][0]
    result = read(tmp_path, "musique", [musique, musique | {"id": "x", "answerable": False}])
    assert result.left_out == {"has no answer": 1}


def test_rows_are_chosen_by_their_fields(tmp_path):
    rows = [gaia_row(number, Level=number % 3 + 1) for number in range(6)]
    result = read(tmp_path, "gaia", rows, where={"Level": [1, "2"]})
    assert [question.id for question in result.questions] == ["t0", "t1", "t3", "t4"]
    assert result.left_out == {"Level is not 1 or 2": 2}
    row = LAYOUTS["webwalkerqa"][0]
    rows = [row, row | {"question": "q2?", "info": {"lang": "zh"}}, row | {"question": "q3?", "info": None}]
    result = read(tmp_path, "webwalkerqa", rows, where={"info.lang": ["zh"]})
    # the number in the file, whatever else is asked
    assert [question.id for question in result.questions] == ["1"]
    with pytest.raises(ValueError, match="file.jsonl: no field Lvel to choose rows by; found .*level"):
        read(tmp_path, "gaia", [gaia_row(0)], where={"Lvel": [1]})
    with pytest.raises(ValueError, match="no questions to ask; left out: {'Level is not 9': 1}"):
        read(tmp_path, "gaia", [gaia_row(0)], where={"Level": [9]})


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


# ---------------------------------------------------------------- golden answers


def test_other_names_of_an_entity_are_right_with_the_file_of_aliases(tmp_path):
    aliases = [
        {"Q_id": "Q7", "aliases": ["Anna", "", "Ann"], "demonyms": ["Annish"]},
        {"Q_id": "Q8", "aliases": ["Bob"], "demonyms": []},
    ]
    (tmp_path / "id_aliases.json").write_text("".join(json.dumps(row) + "\n" for row in aliases))
    row = LAYOUTS["2wikimultihopqa"][0]
    result = read(tmp_path, "2wikimultihopqa", [row, row | {"_id": "89", "answer": "yes", "answer_id": None}], ".json")
    assert [question.answers for question in result.questions] == [["Ann", "Anna", "Annish"], ["yes"]]
    (tmp_path / "id_aliases.json").write_text('{"Q_id": "Q7"}\n')
    with pytest.raises(ValueError, match="id_aliases.json, row 1: expected Q_id and lists aliases"):
        read(tmp_path, "2wikimultihopqa", [row], ".json")


def test_lists_of_golden_answers(tmp_path):
    rows = [{"id": "test_0", "question": "q?", "golden_answers": ["Ann", "Anna"]}]
    for name in ("hotpotqa", "2wikimultihopqa", "musique", "bamboogle"):
        (question,) = read(tmp_path, name, rows, ".parquet").questions
        assert (question.id, question.answers) == ("test_0", ["Ann", "Anna"])


# ---------------------------------------------------------------- xbench's encryption


def encrypt(text: str, key: str) -> str:
    """Each byte of the text XOR the key's byte at the same place, the key repeated; base64 of it."""
    data, key_bytes = text.encode(), key.encode()
    repeated = (key_bytes * (len(data) // len(key_bytes) + 1))[: len(data)]
    secret = (int.from_bytes(data, "big") ^ int.from_bytes(repeated, "big")).to_bytes(len(data), "big")
    return base64.b64encode(secret).decode()


def test_xbench_as_published_and_decrypted(tmp_path):
    canary = "3b8e-never-appear"
    rows = [
        {"id": str(i), "prompt": encrypt(text, canary), "answer": encrypt("四十二", canary), "canary": canary}
        for i, text in enumerate(["谁养水獭？\n第二行", "second, with a comma?"])
    ]
    result = read(tmp_path, "xbench", rows, ".csv").questions
    assert [(question.text, question.answers) for question in result] == [
        ("谁养水獭？\n第二行", ["四十二"]),
        ("second, with a comma?", ["四十二"]),
    ]
    plain = [{"id": "0", "prompt": "谁养水獭？", "answer": "四十二"}]
    assert read(tmp_path, "xbench", plain).questions[0].text == "谁养水獭？"
    for wrong in (plain[0] | {"canary": canary}, rows[0] | {"canary": "another"}):
        with pytest.raises(ValueError, match="encrypted by canary.*leave the canary out: 1 row"):
            read(tmp_path, "xbench", [wrong])


# ---------------------------------------------------------------- what is wrong


@pytest.mark.parametrize("name", LAYOUTS)
def test_another_sets_file_is_told_with_what_was_expected_and_found(tmp_path, name):
    with pytest.raises(ValueError) as raised:
        read(tmp_path, name, [{"Text": "q?", "Label": "a"}, {"more": 1}])
    message = str(raised.value)
    benchmark = find_benchmark(name)
    assert "file.jsonl" in message and benchmark.title in message and "Found: Text, Label, more" in message
    assert all(field in message for field in (*benchmark.question, *benchmark.answer, "reward_model"))


def test_an_empty_file_has_no_rows(tmp_path):
    with pytest.raises(ValueError, match="file.json is no file of GAIA.*Found: no rows"):
        read(tmp_path, "gaia", [], ".json")


def test_bad_rows_are_named_by_number_or_left_out(tmp_path):
    rows = [gaia_row(0), gaia_row(1, Question=" "), gaia_row(2, **{"Final answer": None}), gaia_row(3), 5]
    with pytest.raises(ValueError) as raised:
        read(tmp_path, "gaia", rows, ".json")
    for part in ("no question in Question: 1 row(s) 1", "no answer in Final answer or answer: 1 row(s) 2"):
        assert part in str(raised.value)
    assert "got int: 1 row(s) 4" in str(raised.value)
    result = read(tmp_path, "gaia", rows, ".json", skip_bad_rows=True)
    assert [question.id for question in result.questions] == ["t0", "t3"] and result.left_out == {BAD: 3}


@pytest.mark.parametrize("answer", ["40*27=1080", "#### ", "", None])
def test_gsm8k_without_its_number(tmp_path, answer):
    rows = [{"question": "How many?", "answer": answer}, {"question": "q?", "answer": "x y"}]
    with pytest.raises(ValueError, match="no number after ####"):
        read(tmp_path, "gsm8k", rows)


def test_wrong_arguments_are_named(tmp_path):
    with pytest.raises(ValueError, match="no benchmark 'gaya': choose one of aime24, "):
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


def test_a_response_that_obeys_the_instruction_is_well_formed():
    """The instruction's own example, behind the think that it asks for, is what the rewards want."""
    example = tool_instruction().rpartition("as in ")[2].rstrip(".")
    response = f"<think>Easy.</think>{example}"
    assert check_format(response).problem is None
    assert deep_research.compute_score("bamboogle", response, "Paris")["acc"] == 1.0


def test_the_list_tells_where_every_set_is(capsys):
    main([])
    told = capsys.readouterr().out
    for name, benchmark in BENCHMARKS.items():
        assert f"{name}: {benchmark.title}" in told and benchmark.get in told and benchmark.fields() in told


def test_files_are_checked_from_the_command_line(tmp_path, capsys):
    path = write(tmp_path / "metadata.parquet", [gaia_row(0), gaia_row(1, file_name="x.pdf")])
    main(["gaia", str(path)])
    assert "1 questions; left out: {'comes with a file': 1}" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="error: no benchmark"):
        main(["gaya"])
