"""The text of a path, cut at the ends of its pieces, in the page of trees and in a process reward's steps."""

import importlib.util
import json
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from recipe.common.tiny_model import make_tokenizer
from verl.trainer.ppo.v1.tree_reports import tree_record
from verl.utils.piece_texts import piece_texts
from verl.workers.rollout.trajectory_tree import Segment, TrajectoryTree, tree_of_rows

WORDS = ("<unk>", "▁", "▁Hi", "▁you", "!")


def byte_level() -> PreTrainedTokenizerFast:
    """A token for each byte."""
    core = Tokenizer(models.BPE({each: i for i, each in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core)


def sentence_piece() -> PreTrainedTokenizerFast:
    """Four words, and a token for each byte; as in Llama 2, decoding removes the blank before the first word."""
    names = [*WORDS, *(f"<0x{byte:02X}>" for byte in range(256))]
    core = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [], unk_token="<unk>", byte_fallback=True))
    blank, bytes_, fuse = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()
    core.decoder = decoders.Sequence([blank, bytes_, fuse, decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=core)


SMILE = "😀"
CASES = {
    "byte_level": (byte_level(), byte_level().encode(f"Hi {SMILE} you!")),
    "sentence_piece": (sentence_piece(), [2, 1, *(len(WORDS) + byte for byte in SMILE.encode()), 3, 4]),
}


@pytest.mark.parametrize("kind", CASES)
def test_the_pieces_make_the_whole_wherever_they_are_cut(kind):
    tokenizer, tokens = CASES[kind]
    assert tokenizer.decode(tokens) == f"Hi {SMILE} you!"
    generator = random.Random(0)
    for _ in range(200):
        cuts = sorted(generator.randint(0, len(tokens)) for _ in range(generator.randint(0, 6)))
        pieces = [tokens[a:b] for a, b in zip([0, *cuts], [*cuts, len(tokens)], strict=True)]
        texts = piece_texts(tokenizer.decode, pieces)
        assert "".join(texts) == f"Hi {SMILE} you!" and "\ufffd" not in "".join(texts)
    assert piece_texts(tokenizer.decode, [tokens[:-2], tokens[-2:-1] * 0, tokens[-2:]])[1] == ""
    assert piece_texts(tokenizer.decode, [tokens[:4]])[0].endswith("\ufffd"), "a path may end within a character"


@pytest.mark.parametrize("kind", CASES)
def test_the_page_shows_the_texts_of_the_paths(kind):
    """A fork within the emoji: one branch completes it, the other is cut there."""
    tokenizer, tokens = CASES[kind]
    at = next(i for i in range(len(tokens)) if "\ufffd" in tokenizer.decode(tokens[: i + 1])) + 2
    whole, cut, both = tokens[at:], tokens[at : at + 1], tokens[2:at]
    tree = TrajectoryTree(
        tokens[:2], [Segment(None, both, None), Segment(0, whole, None), Segment(0, cut, None)], [1, 2]
    )
    spec = importlib.util.spec_from_file_location("view_trees", Path(__file__).parents[2] / "scripts/view_trees.py")
    spec.loader.exec_module(page := importlib.util.module_from_spec(spec))
    shown = page.compact(tree_record(tree, 1, "a", [1.0, 0.0], "rows", tokenizer))
    texts = []
    for segment in shown["segments"]:
        own = dict(segment["texts"])
        texts += [own.get(i, shown["vocabulary"].get(str(token))) for i, token in enumerate(segment["tokens"])]
    assert [token for segment in shown["segments"] for token in segment["tokens"]] == both + whole + cut
    prompt, first, second = tokenizer.decode(tokens[:2]), len(both), len(both + whole)
    assert prompt + "".join(texts[:second]) == f"Hi {SMILE} you!"
    assert prompt + "".join(texts[:first] + texts[second:]) == tokenizer.decode(tokens[: at + 1])


def test_a_record_names_the_text_of_every_token():
    tokenizer = make_tokenizer()
    prompt, first, second = (tokenizer(text).input_ids for text in ("1 2 = 3", "1 + 2", "2 - 1"))
    tree = tree_of_rows(prompt, [first, second, first], [[-0.5] * len(row) for row in (first, second, first)])
    record = json.loads(json.dumps(tree_record(tree, 3, "a", [1.0, 0.0, 1.0], "tree", tokenizer)))
    assert record["prompt"] == "1 2 = 3" and record["rewards"] == [1.0, 0.0, 1.0] and record["step"] == 3
    assert set(record["vocabulary"]) == {str(token) for token in {*first, *second}}
    texts = ["".join(record["vocabulary"][str(token)] for token in tokens) for tokens in tree.trajectories()]
    assert texts == ["1 + 2", "2 - 1", "1 + 2"]
