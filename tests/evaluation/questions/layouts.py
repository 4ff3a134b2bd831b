"""Rows of the benchmarks, made up in each published layout and in verl's format, and a file of them that is read."""

import csv
import json

import pandas as pd

from tests.tables import table
from verl.evaluation.questions.loading import read_questions

# name -> (row as published, id, question, answers)
LAYOUTS = {name: case for name, *case in table(__file__, "layouts")}


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
