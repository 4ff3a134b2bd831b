"""Rows with the columns and types of the authors' ARPO-RL-Reasoning-10K, which cannot be downloaded by the tests."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

SYSTEM = (
    "Think between <think> and </think>. Search by <search>query</search> and compute by <python>code</python>; what "
    r"they return stands between <result> and </result>. End with <answer>\boxed{the answer}</answer>."
)
SCHEMA = pa.schema(
    [
        ("data_source", pa.string()),
        ("prompt", pa.list_(pa.struct([("content", pa.string()), ("role", pa.string())]))),
        ("ability", pa.string()),
        ("reward_model", pa.struct([("ground_truth", pa.string()), ("style", pa.string())])),
        (
            "extra_info",
            pa.struct(
                [
                    ("index", pa.int64()),
                    ("need_tools_kwargs", pa.bool_()),
                    ("question", pa.string()),
                    ("split", pa.string()),
                ]
            ),
        ),
        ("metadata", pa.null()),
    ]
)
QUESTIONS = [("What is 1/4 + 1/4?", r"\frac{1}{2}", "math"), ("Who was the 44th president?", "Barack Obama", "qa")]


def published_row(index: int, question: str, answer: str, ability: str | None) -> dict:
    return {
        "data_source": "train",
        "prompt": [{"content": SYSTEM, "role": "system"}, {"content": question, "role": "user"}],
        "ability": ability,
        "reward_model": {"ground_truth": answer, "style": "rule"},
        "extra_info": {"index": index, "need_tools_kwargs": True, "question": question, "split": "train"},
        "metadata": None,
    }


def write_published(path: Path, *more: tuple[str, str, str | None], repeats: int = 1) -> str:
    """Write a row of mathematics and a question, `repeats` times, and then `more` rows; return the path."""
    rows = [published_row(i, *content) for i, content in enumerate([*QUESTIONS * repeats, *more])]
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), path)
    return str(path)
