"""Rows of the benchmarks, made up in each published layout and in verl's format, and a file of them that is read."""

import csv
import json

import pandas as pd

from verl.evaluation.questions.loading import read_questions

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


def verl_row(truth, content: str = "q?", system: str | None = None) -> dict:
    system_message = [{"role": "system", "content": system}] if system else []
    return {
        "data_source": "x",
        "prompt": [*system_message, {"role": "user", "content": content}],
        "reward_model": {"style": "rule", "ground_truth": truth},
    }


def gaia_row(number: int, **fields) -> dict:
    row = {"task_id": f"t{number}", "Question": f"q{number}?", "Level": 1, "Final answer": "a", "file_name": ""}
    return row | fields
