"""Evaluates agents on public question sets, whose answers stand between tags."""

import base64
import itertools
from functools import partial

from verl.evaluation.questions.benchmarks import (
    HUB,
    first_of,
    golds,
    needs_image,
    register_benchmark,
    text_answers,
    text_question,
)
from verl.utils.data_files import BadRow


def musique_answers(row: dict, names: tuple[str, ...]) -> list[str]:
    """Return the answer and its aliases.

    >>> musique_answers({"answer": "Paris", "answer_aliases": ["Lutetia", "Paris"]}, ("answer",))
    ['Paris', 'Lutetia']
    """
    aliases = first_of(row, ["answer_aliases"]) or []
    return golds([*text_answers(row, names), *(aliases if isinstance(aliases, list) else [aliases])])


def decode_xbench(row: dict) -> dict:
    """Return a row of xbench in plain text: in the published files its `canary` encrypts `prompt` and `answer`.

    The UTF-8 bytes of the text are combined by XOR with the repeated bytes of the canary, and the result is encoded as
    base64; xbench_evals.py of https://github.com/xbench-ai/xbench-evals decodes it. A row without a canary is plain.
    """
    if not row.get("canary"):
        return row
    if not all(isinstance(row.get(name), str) for name in ("prompt", "answer", "canary")):
        raise BadRow("expected text in prompt, answer and canary")
    plain = dict(row)
    try:
        for name in ("prompt", "answer"):
            secret, key = base64.b64decode(row[name], validate=True), itertools.cycle(row["canary"].encode())
            plain[name] = bytes(byte ^ key_byte for byte, key_byte in zip(secret, key, strict=False)).decode()
    except ValueError as error:
        raise BadRow("prompt or answer is not encrypted by canary; if it is plain, leave the canary out") from error
    return plain


_register = partial(register_benchmark, style="answer")  # questions that models answer with tools
_register("webwalkerqa", "WebWalkerQA", f"{HUB}/callanwu/WebWalkerQA (main)", scoring="judge")
_register(
    "hotpotqa",
    "HotpotQA",
    f"https://hotpotqa.github.io (hotpot_dev_distractor_v1.json) or {HUB}/hotpotqa/hotpot_qa (validation)",
    scoring="qa",
    answer=("answer", "golden_answers"),
    id=("_id", "id"),
)
_register(
    "2wikimultihopqa",
    "2WikiMultihopQA",
    "https://github.com/Alab-NII/2wikimultihop (data_ids_april7.zip: dev.json)",
    scoring="qa",
    answer=("answer", "golden_answers"),
    id=("_id", "id"),
)
_register(
    "musique",
    "MuSiQue",
    f"https://github.com/StonyBrookNLP/musique (musique_ans_v1.0_dev.jsonl) or {HUB}/dgslibisey/MuSiQue",
    scoring="qa",
    answer=("answer", "golden_answers"),
    read_answers=musique_answers,
    left_out={"has no answer": lambda row: row.get("answerable") is False},
    note="answer_aliases are right, too",
)
_register(
    "bamboogle",
    "Bamboogle",
    f"{HUB}/chiayewken/bamboogle",
    scoring="qa",
    question=("Question",),
    answer=("Answer", "golden_answers"),
)
_register(
    "gaia",
    "GAIA",
    f"{HUB}/gaia-benchmark/GAIA (2023/validation/metadata.parquet; access on request)",
    scoring="judge",
    question=("Question",),
    answer=("Final answer", "answer"),
    id=("task_id",),
    left_out={
        "comes with a file": lambda row: bool(row.get("file_name")),
        "has no public answer: use the validation split": lambda row: (
            str(first_of(row, ("Final answer", "answer"))).strip() == "?"
        ),
    },
)
_register(
    "hle", "HLE", f"{HUB}/cais/hle (test; access on request)", scoring="judge", left_out={"needs an image": needs_image}
)
_register(
    "xbench",
    "xbench-DeepSearch",
    f"https://github.com/xbench-ai/xbench-evals (data/DeepSearch*.csv) or {HUB}/xbench/DeepSearch",
    scoring="judge",
    question=("prompt", "question"),
    read_question=lambda row, names: text_question(decode_xbench(row), names),
    read_answers=lambda row, names: text_answers(decode_xbench(row), names),
    note="encrypted, with the key in the field canary; take the files as published",
)
