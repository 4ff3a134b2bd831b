"""Conversations as published against rows given by hand; each kind of bad row is named."""

import itertools
import json

import pandas as pd
import pytest

from recipe.arpo.sft_data import main, messages_of, split
from recipe.common.tiny_model import write_tiny_model
from tests.tables import table
from verl.utils.data_files import BadRow

CALL, CODE = "<think>t</think><search>q</search>", "<python>print(1 < 2)</python>"
END = r"<think>t</think><answer>\boxed{1}</answer>"
FOUND = "<result>\nhe\n</result>"
TEXTS = {"CALL": CALL, "CODE": CODE, "FOUND": FOUND, "END": END}


def row(*values: str, **more) -> dict:
    """Turns of user and assistant in turn."""
    return turns(*zip(itertools.cycle(("user", "assistant")), values, strict=False)) | more


def turns(*pairs: tuple[str, str]) -> dict:
    """The names of `TEXTS` stand for their texts."""
    return {"conversations": [{"from": name, "value": TEXTS.get(text, text)} for name, text in pairs]}


GOOD = row("Who?", CALL, FOUND, END)


@pytest.mark.parametrize(("pairs", "more", "messages"), table(__file__, "messages"))
def test_rows_become_messages(pairs, more, messages):
    expected = [{"role": role, "content": TEXTS.get(text, text)} for role, text in messages]
    assert messages_of(turns(*pairs) | more) == expected


@pytest.mark.parametrize(("pairs", "more", "problem"), table(__file__, "bad rows"))
def test_bad_rows_are_named(pairs, more, problem):
    with pytest.raises(BadRow, match=problem):
        messages_of(turns(*pairs) | more)


def test_other_tools():
    conversation = row("Who?", "<think>t</think><roll>6</roll>", FOUND, END)
    with pytest.raises(BadRow):
        messages_of(conversation)
    assert len(messages_of(conversation, ["roll"])) == 4


def write(path, rows: list):
    if path.suffix == ".parquet":
        pd.DataFrame(rows).to_parquet(path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(entry) + "\n" for entry in rows))
    else:
        path.write_text(json.dumps(rows))
    return str(path)


def read(path) -> list[dict]:
    rows = pd.read_parquet(path).to_dict("records")
    return [{"row": entry["row"], "messages": list(entry["messages"])} for entry in rows]


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".parquet"])
def test_files_of_each_kind(tmp_path, suffix):
    source = write(tmp_path / f"in{suffix}", [GOOD, row("What?", END)])
    main(["--input", source, "--output", str(tmp_path / "out"), "--val-fraction", "0"])
    written = read(tmp_path / "out/train.parquet")
    assert [entry["row"] for entry in written] == [0, 1] and written[0]["messages"] == messages_of(GOOD)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["train.parquet"]


def test_bad_rows_stop_or_are_left_out_and_listed(tmp_path, capsys):
    rows = [GOOD, {"question": "Who?"}, row("What?", END), row("Who?", CALL, FOUND, CALL)]
    source = write(tmp_path / "in.jsonl", rows)
    arguments = ["--input", source, "--output", str(tmp_path / "out")]
    with pytest.raises(SystemExit, match="nothing was written"):
        main(arguments)
    assert not (tmp_path / "out").exists()
    printed = capsys.readouterr().out
    assert "2 bad row(s)" in printed and "row 1: " in printed and "row 3: no <result> right after </search>" in printed

    main([*arguments, "--on-error", "skip"])
    rows = read(tmp_path / "out/train.parquet") + read(tmp_path / "out/val.parquet")
    assert sorted(entry["row"] for entry in rows) == [0, 2]
    listed = [json.loads(line) for line in (tmp_path / "out/bad_rows.jsonl").read_text().splitlines()]
    assert [entry["row"] for entry in listed] == [1, 3]

    main(["--input", write(tmp_path / "good.json", [GOOD]), "--output", str(tmp_path / "out")])
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["train.parquet"]  # nothing of the earlier run


def test_lengths_and_special_tokens_are_checked_with_a_tokenizer(tmp_path, capsys):
    model = str(write_tiny_model(tmp_path / "model"))
    harmless = row("Who?", CALL, "<result><|im_end|></result>", END)
    rows = [GOOD, row("Who?" * 100, END), row("Who?", "<|im_end|>" + END), harmless]
    arguments = ["--input", write(tmp_path / "in.json", rows), "--output", str(tmp_path / "out"), "--on-error", "skip"]
    main([*arguments, "--tokenizer", model, "--max-length", "300", "--val-fraction", "0"])
    assert [entry["row"] for entry in read(tmp_path / "out/train.parquet")] == [0, 3]
    printed = capsys.readouterr().out
    assert "tokens, more than 300" in printed and "special token <|im_end|> in the text of assistant" in printed


@pytest.mark.parametrize(("arguments", "message"), table(__file__, "mistakes"))
def test_mistakes_end_with_one_line(tmp_path, arguments, message):
    (tmp_path / "bad.jsonl").write_text("{")
    (tmp_path / "empty.jsonl").write_text("")
    write(tmp_path / "good.json", [GOOD])
    with pytest.raises(SystemExit, match=message):
        main([argument.format(folder=tmp_path) for argument in arguments] + ["--output", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_the_split_is_seeded_and_keeps_questions_together():
    rows = [{"messages": [{"role": "user", "content": f"q{number % 50}"}], "row": number} for number in range(200)]
    train, val = split(rows, 0.1, seed=0)
    assert (train, val) == split(rows, 0.1, seed=0) != split(rows, 0.1, seed=1)
    assert len(val) == 20 and sorted(entry["row"] for entry in train + val) == list(range(200))
    questions = [{entry["messages"][0]["content"] for entry in part} for part in (train, val)]
    assert not questions[0] & questions[1]
    assert [entry["row"] for entry in train] == sorted(entry["row"] for entry in train)
    assert [len(part) for part in split(rows[:2], 0.01, seed=0)] == [1, 1]
    assert [len(part) for part in split(rows[:1], 0.9, seed=0)] == [1, 0]
