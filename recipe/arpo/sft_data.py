"""Makes the parquet files of the cold start from conversations with tools in ShareGPT's layout.

    python -m recipe.arpo.sft_data --input demos.json --output outputs/data/arpo_sft --tokenizer MODEL

A row of --input (.json, .jsonl or .parquet) and what becomes of it:

    {"system": "Use tools.",                                     # may also be a turn, or be left out
     "conversations": [
       {"from": "user", "value": "Who?"},                        -> {"role": "user", "content": "Who?"}
       {"from": "assistant", "value": "…<search>q</search>"},    -> {"role": "assistant", "content": the same}
       {"from": "user", "value": "<result>he</result>"},         -> {"role": "tool", "content": "he"}
       {"from": "assistant", "value": "…<answer>…</answer>"}]}   -> {"role": "assistant", "content": the same}

which `verl.utils.dataset.tool_sft_dataset` reads: loss on the assistant's parts only. Each row must be as the rewards
want a response to be (`tool_format.check_format`).
"""

import argparse
import json
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from verl.utils.atomic_files import replacing
from verl.utils.data_files import BadRow, read_rows
from verl.utils.reward_score.tool_format import TOOL_TAGS, check_format

ROLES = {"system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant"}
ROLES |= {"observation": "tool", "tool": "tool"}
LISTED = 20


@dataclass
class Demonstrations:
    """Rows for training and what was left out.

    Attributes:
        rows: `messages` and `row`, its number in the file (0 for the first).
        bad: row number -> what is wrong with it.
    """

    rows: list[dict] = field(default_factory=list)
    bad: dict[int, str] = field(default_factory=dict)


def messages_of(row: dict, tool_tags: Iterable[str] = TOOL_TAGS) -> list[dict]:
    """Prompt (system, user) and response (assistant, tool, …, assistant) of one row.

    Outer white space of each turn is removed, and the tags around a result, which the rollout writes itself. Results
    within an assistant's turn become messages of their own.

    Raises:
        BadRow: the turns are not those of one question and its response, or the response is not well-formed.
    """
    turns = _turns(row)
    start = next((place for place, (role, _) in enumerate(turns) if role == "assistant"), len(turns))
    if [role for role, _ in turns[:start]] not in (["user"], ["system", "user"]):
        raise BadRow(f"expected system (or none), user, assistant first, got {_names(turns)}")
    if turns[-1][0] != "assistant":
        raise BadRow("the last turn is not the assistant's")
    messages = [{"role": role, "content": text} for role, text in turns[:start]]
    for place, (role, text) in enumerate(turns[start:]):
        expected = "tool" if place % 2 else "assistant"
        if role != expected:
            raise BadRow(f"turn {start + place} is {role}, expected {expected}")
        messages += _split_results(text) if role == "assistant" else [{"role": "tool", "content": text}]
    response = _response_text(messages[start:])
    report = check_format(response, tool_tags)
    if not report.well_formed:
        raise BadRow(f"{report.problem}, at {response[report.position :][:40]!r}")
    return messages


def _turns(row: dict) -> list[tuple[str, str]]:
    """(role, text) of each turn; a user's turn that is a result is the tool's, without its tags."""
    conversations = row.get("conversations") if isinstance(row, dict) else None
    if not isinstance(conversations, list) or not conversations:
        raise BadRow("no list of turns in conversations")
    turns = []
    if isinstance(row.get("system"), str) and row["system"].strip():
        turns.append(("system", row["system"].strip()))
    for place, turn in enumerate(conversations):
        role = ROLES.get(turn.get("from")) if isinstance(turn, dict) else None
        text = turn.get("value") if isinstance(turn, dict) else None
        if role is None:
            raise BadRow(f"turn {place}: from is none of {', '.join(ROLES)}")
        if not isinstance(text, str) or not text.strip():
            raise BadRow(f"turn {place} ({role}) is empty or no text")
        text = text.strip()
        is_result = text.startswith("<result>") and text.endswith("</result>")
        if role in ("user", "tool") and is_result:
            role, text = "tool", text.removeprefix("<result>").removesuffix("</result>").strip()
        turns.append((role, text))
    return turns


def _names(turns: list[tuple[str, str]]) -> str:
    return ", ".join(role for role, _ in turns[:4])


def _split_results(text: str) -> list[dict]:
    """An assistant's turn as messages: its own parts, and results in it as the tool's."""
    messages = []
    while text:
        own, opening, rest = text.partition("<result>")
        if own.strip():
            messages.append({"role": "assistant", "content": own.strip()})
        result, closing, text = rest.partition("</result>")
        if opening and not closing:
            raise BadRow("<result> is not closed in an assistant's turn")
        if opening:
            messages.append({"role": "tool", "content": result.strip()})
    return messages


def _response_text(messages: list[dict]) -> str:
    """The response for the check of its form: results, in which the rollout neutralises tags, stand without theirs."""
    parts = (message["content"] if message["role"] == "assistant" else "<result></result>" for message in messages)
    return "".join(parts)


def make_length_check(tokenizer, max_length: int, tool_tags: Iterable[str]) -> Callable[[list[dict]], None]:
    """A check that raises BadRow for messages of more than `max_length` tokens or with special tokens in their text."""
    from verl.utils.dataset.tool_sft_dataset import DemonstrationEncoder

    encoder = DemonstrationEncoder(tokenizer, tool_tags)

    def check(messages: list[dict]) -> None:
        for message in messages:
            special = next((token for token in tokenizer.all_special_tokens if token in message["content"]), None)
            if special and message["role"] != "tool":  # the rollout neutralises those of a tool
                raise BadRow(f"special token {special} in the text of {message['role']}")
        length = len(encoder.encode(messages)[0])
        if length > max_length:
            raise BadRow(f"{length} tokens, more than {max_length}")

    return check


def convert(rows: Iterable[dict], tool_tags: Iterable[str], check: Callable[[list[dict]], None]) -> Demonstrations:
    """Every row by `messages_of`, then `check`; bad ones are told, not raised."""
    demonstrations = Demonstrations()
    for number, row in enumerate(rows):
        try:
            messages = messages_of(row, tool_tags)
            check(messages)
        except BadRow as error:
            demonstrations.bad[number] = str(error)
        else:
            demonstrations.rows.append({"messages": messages, "row": number})
    return demonstrations


def split(rows: list[dict], val_fraction: float, seed: int) -> tuple[list[dict], list[dict]]:
    """Training and validation rows, in order; rows of one question stay together.

    Args:
        rows: at least one.
        val_fraction: of the questions, in [0, 1); above 0 at least one question, where one is left to train on.
    """
    questions = list(dict.fromkeys(_question(row) for row in rows))
    count = min(max(round(val_fraction * len(questions)), int(val_fraction > 0)), len(questions) - 1)
    chosen = set(random.Random(seed).sample(questions, count))
    return [row for row in rows if _question(row) not in chosen], [row for row in rows if _question(row) in chosen]


def _question(row: dict) -> str:
    return next(message["content"] for message in row["messages"] if message["role"] == "user")


def describe_bad(bad: dict[int, str]) -> str:
    """The first bad rows, one a line, and how many more there are."""
    lines = [f"  row {number}: {problem}" for number, problem in list(bad.items())[:LISTED]]
    if len(bad) > LISTED:
        lines.append(f"  and {len(bad) - LISTED} more")
    return "\n".join(lines)


def write_sft_data(demonstrations: Demonstrations, output: Path, val_fraction: float, seed: int) -> Counter:
    """Write train.parquet, val.parquet (if it has rows) and bad_rows.jsonl (if there are any), each complete or not at
    all; older ones are replaced or removed. Returns the number of rows by file."""
    train, val = split(demonstrations.rows, val_fraction, seed)
    bad = [{"row": number, "problem": problem} for number, problem in demonstrations.bad.items()]
    contents = {"bad_rows.jsonl": bad, "val.parquet": val, "train.parquet": train}
    for name, rows in contents.items():
        path = output / name
        if not rows:
            path.unlink(missing_ok=True)
            continue
        with replacing(path) as unfinished:
            if path.suffix == ".parquet":
                pq.write_table(pa.Table.from_pylist(rows), unfinished)
            else:
                unfinished.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return Counter({name: len(rows) for name, rows in contents.items()})


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", required=True, type=Path)
    parser.add_argument("--output", required=True, type=Path, help="a folder")
    parser.add_argument("--tokenizer", help="the model to train: rows are checked for its length and special tokens")
    parser.add_argument("--max-length", type=int, default=15000, help="tokens; longer rows are bad (15000)")
    parser.add_argument("--tool-tags", nargs="+", default=list(TOOL_TAGS))
    parser.add_argument("--val-fraction", type=float, default=0.02, help="of the questions (0.02)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of validation questions")
    parser.add_argument("--on-error", choices=("stop", "skip"), default="stop", help="when there are bad rows (stop)")
    args = parser.parse_args(arguments)
    if not 0 <= args.val_fraction < 1:
        parser.error(f"--val-fraction {args.val_fraction}: expected at least 0 and below 1")
    if args.max_length < 1:
        parser.error(f"--max-length {args.max_length}: expected at least 1")
    return args


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(arguments)
    check = _no_check
    try:
        if args.tokenizer:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
            check = make_length_check(tokenizer, args.max_length, args.tool_tags)
        demonstrations = convert(read_rows(args.input), args.tool_tags, check)
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from error
    if demonstrations.bad:
        print(f"{args.input}: {len(demonstrations.bad):,} bad row(s)\n{describe_bad(demonstrations.bad)}")
    if demonstrations.bad and args.on_error == "stop":
        raise SystemExit("error: nothing was written; --on-error skip leaves bad rows out")
    if not demonstrations.rows:
        raise SystemExit(f"error: {args.input} has no usable rows; nothing was written")
    counts = write_sft_data(demonstrations, args.output, args.val_fraction, args.seed)
    print(f"{counts['train.parquet']:,} rows to train on, {counts['val.parquet']:,} to validate on, in {args.output}")
    if not args.tokenizer:
        print("lengths were not checked: there was no --tokenizer")


def _no_check(messages: list[dict]) -> None:
    """Without a tokenizer there is nothing more to check."""


if __name__ == "__main__":
    main()
