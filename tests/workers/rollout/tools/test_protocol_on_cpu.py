"""Tags, calls and results in tokens, also for tokenizers whose merges cross the tags."""

import time

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.recipe.arpo.toy_agent import TOKENIZER, encode
from verl.workers.rollout.tools.protocol import Protocol


def byte_level(*merged: str) -> Tokenizer:
    """A BPE of bytes, with merges of two of them."""
    vocab = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *merged]
    core = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(vocab)}, merges=[tuple(x) for x in merged]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return core


@pytest.fixture(scope="module")
def merging():
    """A byte-level BPE that merges a tag's `>` with the newline or the blank after it."""
    core = byte_level(">Ċ", ">Ġ")
    core.add_special_tokens(["<eos>"])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")


def test_the_first_call_ends_at_its_closing_tag():
    protocol = Protocol(TOKENIZER, ["search", "python"])
    tokens = encode("<think>so</think><python>1+1</python><search>x</search>")
    end, tag = protocol.first_call(tokens)
    assert (TOKENIZER.decode(tokens[:end]), tag) == ("<think>so</think><python>1+1</python>", "python")
    assert protocol.first_call(encode("<search>not yet")) is None
    assert protocol.call(tokens[:end]) == ("python", "1+1")


def test_a_token_that_reaches_beyond_the_tag_stays_whole(merging):
    protocol = Protocol(merging, ["search"])
    text = "<search>capital of France</search>\n\nso"
    tokens = merging.encode(text, add_special_tokens=False)
    end, tag = protocol.first_call(tokens)
    kept = merging.decode(tokens[:end])
    assert tag == "search" and "</search>" in kept and "</search>" not in merging.decode(tokens[: end - 1])
    assert kept != text[: text.index("</search>") + 9]  # the merge does cross the tag, else this shows nothing
    assert protocol.call(tokens[:end]) == ("search", "capital of France")


def test_ids_are_appended_not_encoded_again(merging):
    protocol = Protocol(merging, ["search"])
    call = merging.encode("<search>x</search>", add_special_tokens=False)
    appended = [*call, *protocol.result_ids("Paris", 100)]
    assert merging.decode(appended) == "<search>x</search> <result>\nParis\n</result>"
    assert merging.encode(merging.decode(appended), add_special_tokens=False) != appended


@pytest.mark.parametrize("cut", range(1, 10))
def test_the_rest_of_a_begun_tag_ends_the_next_request(cut):
    protocol = Protocol(TOKENIZER, ["search"])
    stops = protocol.stops(encode("<search>x" + "</search>"[:cut]))
    assert "</search>" in stops and (cut == 9 or "</search>"[cut:] in stops)


@pytest.mark.parametrize(
    ("text", "content"),
    [("<search>a<search> b </search>", "b"), ("</search>", None), ("<python>1</python></search>", None)],
)
def test_a_call_begins_at_the_last_opening_tag(text, content):
    assert Protocol(TOKENIZER, ["search"]).call(encode(text)) == ("search", content)


def test_control_tokens_in_a_result_are_text(merging):
    for tokenizer, token in ((TOKENIZER, "<|endoftext|>"), (merging, "<eos>")):
        ids = Protocol(tokenizer, ["search"]).result_ids(f"a {token} b", 100)
        assert not set(ids) & set(tokenizer.all_special_ids)
    core = byte_level()
    core.add_special_tokens(["[INST]"])
    core.add_tokens(["<start_of_turn>", "pal"])  # the first is a mark of a chat template, though no special token
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    ids = Protocol(tokenizer, ["search"]).result_ids("pal <start_of_turn> [INST]", 100)
    known = {token.content: i for i, token in tokenizer.added_tokens_decoder.items()}
    assert known["pal"] in ids and not {known["<start_of_turn>"], known["[INST]"]} & set(ids)


@pytest.mark.parametrize("hostile", ["<" + " " * 200_000, "< " * 100_000, "x" * 3_000_000])
def test_hostile_results_take_no_time(hostile):
    started = time.process_time()
    Protocol(TOKENIZER, ["search"]).result_ids(hostile, 1024)
    assert time.process_time() - started < 2


def test_a_result_fits_its_room_or_is_none():
    protocol = Protocol(TOKENIZER, ["search"])
    for room in range(60):
        ids = protocol.result_ids("0123456789" * 5, room)
        text = TOKENIZER.decode(ids)
        assert len(ids) <= room and (not ids or text.startswith(" <result>\n0") and text.endswith("\n</result>"))
    assert protocol.result_ids("10\n", 100) == protocol.result_ids(" 10", 100) == encode(" <result>\n10\n</result>")
