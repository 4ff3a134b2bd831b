"""Makes the parquet files of the cold start from conversations with tools in ShareGPT's layout.

    python -m recipe.arpo.sft_data --input demos.json --output outputs/data/arpo_sft --tokenizer MODEL

A row of --input (.json, .jsonl or .parquet) and the messages made from it:

    {"system": "Use tools.",                                     # may also be a turn, or be left out
     "conversations": [
       {"from": "user", "value": "Who?"},                        -> {"role": "user", "content": "Who?"}
       {"from": "assistant", "value": "…<search>q</search>"},    -> {"role": "assistant", "content": the same}
       {"from": "user", "value": "<result>he</result>"},         -> {"role": "tool", "content": "he"}
       {"from": "assistant", "value": "…<answer>…</answer>"}]}   -> {"role": "assistant", "content": the same}

`verl.utils.dataset.tool_sft_dataset` reads the messages and puts the loss on the assistant's parts only. Each row's
response must have the format that the rewards require (`tool_format.check_format`).
"""

import argparse
import random
from collections.abc import Iterable
from pathlib import Path

from transformers import AutoTokenizer

from verl.utils.data_files import LISTED, BadRow, check_characters, read_rows, write_rows
from verl.utils.dataset.tool_sft_dataset import DemonstrationEncoder, encoder_of
from verl.utils.reward_score.tool_format import TOOL_TAGS, check_format

ROLES = {"system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant"}
ROLES |= {"observation": "tool", "tool": "tool"}
# In ShareGPT's layout <image> in a turn stands for a file that is named in `images`.
MEDIA = ("image", "video", "audio")


def messages_of(row: dict, tool_tags: Iterable[str] = TOOL_TAGS) -> list[dict]:
    """Return the prompt (system, user) and response (assistant, tool, …, assistant) of one row as messages.

    Outer white space of each turn is removed, and so are the tags around a result, which the rollout writes itself.
    Results within an assistant's turn become messages of their own. Raise BadRow for other turns.
    """
    turns = _turns(row)
    start = next((place for place, (role, _) in enumerate(turns) if role == "assistant"), len(turns))
    if [role for role, _ in turns[:start]] not in (["user"], ["system", "user"]):
        roles = ", ".join(role for role, _ in turns[:4])
        raise BadRow(f"expected system (or none), user, assistant first, got {roles}")
    if turns[-1][0] != "assistant":
        raise BadRow("the last turn is not the assistant's")
    messages = [{"role": role, "content": text} for role, text in turns[:start]]
    for place, (role, text) in enumerate(turns[start:]):
        expected = "tool" if place % 2 else "assistant"
        if role != expected:
            raise BadRow(f"turn {start + place} is {role}, expected {expected}")
        messages += _split_results(text) if role == "assistant" else [{"role": "tool", "content": text}]
    # The rollout neutralizes tags in results, so results are checked here without their text.
    response = "".join(m["content"] if m["role"] == "assistant" else "<result></result>" for m in messages[start:])
    report = check_format(response, tool_tags)
    if not report.well_formed:
        raise BadRow(f"{report.problem}, at {response[report.position :][:40]!r}")
    return messages


def _turns(row: dict) -> list[tuple[str, str]]:
    """Return (role, text) of each turn; a user's turn that is a result gets the role tool, and loses its tags."""
    conversations = row.get("conversations") if isinstance(row, dict) else None
    if not isinstance(conversations, list) or not conversations:
        raise BadRow("no list of turns in conversations")
    for key in (*MEDIA, *(f"{kind}s" for kind in MEDIA)):
        if row.get(key):
            raise BadRow(f"it has {key}, and only text can be trained")
    turns = []
    if isinstance(row.get("system"), str) and row["system"].strip():
        turns.append(("system", row["system"].strip()))
        _check_text("system", *turns[0])
    for place, turn in enumerate(conversations):
        role = ROLES.get(turn.get("from", "")) if isinstance(turn, dict) else None
        text = turn.get("value") if isinstance(turn, dict) else None
        if role is None:
            raise BadRow(f"turn {place}: from is none of {', '.join(ROLES)}")
        if not isinstance(text, str) or not (text.strip() or role == "tool"):
            raise BadRow(f"turn {place} ({role}) is empty or no text")
        text = text.strip()
        is_result = text.startswith("<result>") and text.endswith("</result>")
        if role in ("user", "tool") and is_result:
            role, text = "tool", text.removeprefix("<result>").removesuffix("</result>").strip()
        _check_text(f"turn {place} ({role})", role, text)
        turns.append((role, text))
    return turns


def _check_text(name: str, role: str, text: str) -> None:
    """Raise BadRow if a text stands for a picture, a video or a sound, or cannot be written to a file; only a tool's or
    the assistant's may contain a tag <image>."""
    for kind in MEDIA:
        if role in ("system", "user") and f"<{kind}>" in text:
            raise BadRow(f"{name} has <{kind}>, and only text can be trained")
    check_characters(name, text)


def _split_results(text: str) -> list[dict]:
    """Split an assistant's turn into messages: its own parts, and the results in it with the role tool."""
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


def check_tokens(messages: list[dict], encoder: DemonstrationEncoder, max_length: int) -> None:
    """Raise BadRow for messages of more than `max_length` tokens, or with a special token outside a tool's result."""
    for message in messages:
        special = next((token for token in encoder.tokenizer.all_special_tokens if token in message["content"]), None)
        if special and message["role"] != "tool":  # The rollout neutralizes special tokens in a tool's text.
            raise BadRow(f"special token {special} in the text of {message['role']}")
    length = len(encoder.encode(messages)[0])
    if length > max_length:
        raise BadRow(f"{length} tokens, more than {max_length}")


def convert(
    rows: Iterable[dict], tool_tags: Iterable[str], encoder: DemonstrationEncoder | None, max_length: int
) -> tuple[list[dict], dict[int, str]]:
    """Convert every row by `messages_of`, and check it by `check_tokens` if there is an encoder.

    Return the good rows as `messages` and `row`, the row's number from 0 on; and row number -> problem of the bad ones.
    """
    good, bad = [], {}
    for number, row in enumerate(rows):
        try:
            messages = messages_of(row, tool_tags)
            if encoder:
                check_tokens(messages, encoder, max_length)
            good.append({"messages": messages, "row": number})
        except ValueError as error:
            bad[number] = str(error)
    return good, bad


def split(rows: list[dict], val_fraction: float, seed: int) -> tuple[list[dict], list[dict]]:
    """Split rows into training and validation rows, in order; rows of one question stay together. `val_fraction` is a
    share of the questions in [0, 1); above 0 it is at least one, but never all of them."""
    questions = [next(m["content"] for m in row["messages"] if m["role"] == "user") for row in rows]
    distinct = list(dict.fromkeys(questions))
    count = min(max(round(val_fraction * len(distinct)), int(val_fraction > 0)), len(distinct) - 1)
    chosen = set(random.Random(seed).sample(distinct, count))
    parts: tuple[list[dict], list[dict]] = [], []
    for row, question in zip(rows, questions, strict=True):
        parts[question in chosen].append(row)
    return parts


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", required=True, type=Path)
    parser.add_argument("--output", required=True, type=Path, help="a folder")
    parser.add_argument("--tokenizer", help="the model to train: rows are checked for its length and special tokens")
    parser.add_argument("--max-length", type=int, default=15000, help="tokens; longer rows are bad (15000)")
    parser.add_argument("--tool-tags", nargs="+", default=list(TOOL_TAGS))
    parser.add_argument("--environment", choices=("tools", "chat"), default="tools", help="of the RL run (tools)")
    parser.add_argument("--tool-functions", help="for chat: JSON file with the tools in OpenAI's format")
    parser.add_argument("--val-fraction", type=float, default=0.02, help="of the questions (0.02)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of validation questions")
    parser.add_argument("--on-error", choices=("stop", "skip"), default="stop", help="when there are bad rows (stop)")
    args = parser.parse_args(arguments)
    if not 0 <= args.val_fraction < 1:
        parser.error(f"--val-fraction {args.val_fraction}: expected at least 0 and below 1")
    if args.max_length < 1:
        parser.error(f"--max-length {args.max_length}: expected at least 1")
    encoder = None
    try:
        if args.tokenizer:
            tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
            encoder = encoder_of(tokenizer, args.environment, args.tool_tags, functions_file=args.tool_functions)
        rows, bad = convert(read_rows(args.input), args.tool_tags, encoder, args.max_length)
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from error
    if bad:
        lines = [f"  row {number}: {problem}" for number, problem in bad.items()]
        more = [f"  and {len(bad) - LISTED} more"] if len(bad) > LISTED else []
        print(f"{args.input}: {len(bad):,} bad row(s)", *lines[:LISTED], *more, sep="\n")
    if bad and args.on_error == "stop":
        raise SystemExit("error: nothing was written; --on-error skip leaves bad rows out")
    if not rows:
        raise SystemExit(f"error: {args.input} has no usable rows; nothing was written")
    train, val = split(rows, args.val_fraction, args.seed)
    listed = [{"row": number, "problem": problem} for number, problem in bad.items()]
    for name, content in {"bad_rows.jsonl": listed, "val.parquet": val, "train.parquet": train}.items():
        if content:
            write_rows(args.output / name, content)
        else:
            (args.output / name).unlink(missing_ok=True)  # It may be left from an earlier call.
    print(f"{len(train):,} rows to train on, {len(val):,} to validate on, in {args.output}")
    if not args.tokenizer:
        print("lengths were not checked: there was no --tokenizer")


if __name__ == "__main__":
    main()
