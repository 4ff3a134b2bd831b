"""Contexts of a rollout: the rule of `environment.thinking` and `max_context`, and rows with contexts."""

import asyncio

import numpy as np
import pytest

from recipe.common.tree import Policy as Plain
from tests.conformance.trees import ParagraphEngine
from tests.workers.rollout.toy_engine import EOS, VOCAB, Calls, HashEngine, RewrittenGame
from verl.workers.engine.prefix_tree.trie import distinct_tokens
from verl.workers.rollout.contexts import (
    Context,
    ContextKeys,
    ContextRule,
    contexts_cell,
    contexts_of_cell,
    sequences_of_row,
    trained_contexts,
)
from verl.workers.rollout.tree_builder import grow
from verl.workers.rollout.tree_rollout import rows_of

PROMPT = [3, 1]


class Words:
    """A tokenizer of one token for each of these texts."""

    TEXTS = ["<think>", "</think>", "\n", "\n\n", "a", "b", "c", "</thi", "nk>d", "ask", "user", "assistant"]

    def encode(self, text, add_special_tokens=False):
        tokens = []
        while text:
            longest = max((known for known in self.TEXTS if text.startswith(known)), key=len, default="")
            tokens.append(self.TEXTS.index(longest) if longest else 100 + ord(text[0]))
            text = text[max(1, len(longest)) :]
        return tokens

    def decode(self, tokens):
        return "".join(self.TEXTS[token] if token < 100 else chr(token - 100) for token in tokens)


def context(turns: list[tuple[str, str]], prompt: str = "askassistant", **keys) -> str:
    """The text that the turn after the last of these turns and answers reads."""
    words, tokens, answers = Words(), [], []
    for turn, answer in turns:
        tokens += words.encode(turn)
        answers.append((len(tokens), len(tokens) + len(words.encode(answer))))
        tokens += words.encode(answer)
    rule = ContextRule(ContextKeys(**keys), words)
    return words.decode(rule.after(words.encode(prompt), tokens, answers))


@pytest.mark.parametrize(
    ("prompt", "turn", "read"),
    [
        ("ask", "<think>a</think>\n\nb", "askb"),
        ("ask", "b", "askb"),
        ("ask", "<think>a</think>c<think>b</think>\n\n\nb", "askb"),
        ("ask", "<think>a</think>", "ask"),
        ("ask", "<think>ab", "ask<think>ab"),  # the thinking has no end
        ("ask<think>\n", "a</think>\n\nb", "askb"),  # the template opens it
        ("ask<think>\n", "b", "ask<think>\nb"),
        ("ask", "<think>a</think>b", "askb"),
    ],
)
def test_a_turn_is_read_without_its_thinking(prompt, turn, read):
    assert context([(turn, "user")], prompt, thinking="dropped") == read + "user"
    assert context([(turn, "user")], prompt) == prompt + turn + "user"


def test_a_token_that_ends_thinking_and_begins_an_answer_is_kept_in_part():
    words = Words()
    turn = [0, 4, 7, 8, 5]  # <think> a </thi nk>d b
    rule = ContextRule(ContextKeys(thinking="dropped"), words)
    assert words.decode(rule.after([9], [*turn, 10], [(5, 6)])) == "askdbuser"


def test_every_turn_is_read_as_the_template_opens_the_next():
    turns = [("a</think>\n\nb", "user<think>\n"), ("b</think>c", "user<think>\n")]
    assert context(turns, "ask<think>\n", thinking="dropped") == "askbusercuser<think>\n"


@pytest.mark.parametrize(
    ("most", "read"), [(7, "askaubucu"), (6, "askbucu"), (5, "askbucu"), (4, "askcu"), (1, "askcu")]
)
def test_the_oldest_turns_are_left_out(most, read):
    turns = [("a", "u"), ("b", "u"), ("c", "u")]
    assert context(turns, "ask", max_context=most) == read
    thinking = [(f"<think>c</think>{turn}", answer) for turn, answer in turns]
    assert context(thinking, "ask", max_context=most, thinking="dropped") == read


def test_a_context_that_holds_everything_changes_nothing():
    def tree(rule):
        options = {"max_tokens": 40, "stop_token_ids": [EOS], "vocab_size": VOCAB, "seed": 1}
        return asyncio.run(
            grow(HashEngine(3.0, 2), PROMPT, 6, Plain(), environment=Calls(3), context_rule=rule, **options)
        )

    rule = ContextRule(ContextKeys(max_context=1000), Words())
    without, large = tree(None), tree(rule)
    assert large.to_json() == without.to_json()
    assert rows_of(large, Plain()) == rows_of(without, Plain())
    assert not any(large.contexts(leaf) for leaf in large.leaves)


@pytest.mark.parametrize("most", [4, 12, 20])
def test_no_turn_reads_more_than_the_limit_nor_writes_beyond_the_models(most):
    class Watched(ParagraphEngine):
        async def generate(self, request):
            assert len(request.prompt_ids) + request.max_tokens <= 24
            return await super().generate(request)

    contexts = []
    for seed in range(8):
        rule, engine = ContextRule(ContextKeys(max_context=most), Words()), Watched()
        options = {"max_tokens": 90, "stop_token_ids": [EOS], "vocab_size": VOCAB, "seed": seed, "max_model_len": 24}
        tree = asyncio.run(grow(engine, PROMPT, 6, Plain(), environment=Calls(8), context_rule=rule, **options))
        read = [list(request.prompt_ids) for request in engine.asked]
        longest = max(len(segment.token_ids) for segment in tree.segments)
        for context in [context for leaf in tree.leaves for context in tree.contexts(leaf)]:
            assert list(context.ids) in read and len(context.ids) <= max(most, len(PROMPT) + 2 * longest)
            contexts.append(context)
    assert contexts


# ---- rows ----


def test_cells_hold_contexts():
    for contexts in ([], [Context(3, [7])], [Context(2, [5, 6]), Context(9, []), Context(12, None)]):
        actual = contexts_of_cell(contexts_cell(contexts))
        assert [(start, ids if ids is None else list(ids)) for start, ids in actual] == contexts


def test_sequences_hold_every_trained_token_of_a_row_once():
    row = np.arange(10)
    contexts = [Context(3, [50, 51]), Context(6, [60]), Context(8, None)]
    sequences = sequences_of_row(row, contexts)
    assert [tokens.tolist() for tokens in sequences.tokens] == [[0, 1, 2], [50, 51, 3, 4, 5], [60, 6, 7]]
    assert sequences.of_row(sequences.tokens, fill=-1).tolist() == [*range(8), -1, -1]
    assert [tokens.tolist() for tokens in sequences_of_row(row).tokens] == [row.tolist()]


@pytest.mark.parametrize(
    ("max_rows", "max_tokens", "trained"),
    [(9, 99, 3), (3, 99, 2), (1, 99, 0), (9, 14, 3), (9, 13, 2), (9, 10, 1), (9, 2, 0)],
)
def test_first_sequences_are_trained_as_far_as_the_limits_allow(max_rows, max_tokens, trained):
    contexts = [Context(3, [50, 51]), Context(6, [50, 51, 61]), Context(8, [0, 1, 9])]
    first = trained_contexts(range(10), contexts, max_rows, max_tokens, distinct_tokens)
    untrained = [Context(context.start, None) for context in contexts[trained : trained + 1]]
    assert first == contexts[:trained] + untrained


def test_the_reward_of_an_untrained_end_stands_at_the_last_trained_token():
    game = RewrittenGame(6)
    options = {"max_tokens": 60, "stop_token_ids": [EOS], "vocab_size": VOCAB, "seed": 0}
    tree = asyncio.run(grow(HashEngine(6.0, 1), PROMPT, 12, Plain(), environment=game, **options))
    shown = [segment.info.shown() for segment in tree.segments if segment.info.context]
    assert shown and all(about["context_tokens"] > 1 for about in shown)
    cut = 0
    for leaf, row in zip(tree.leaves, rows_of(tree, Plain()), strict=True):
        row.contexts = trained_contexts(
            [*row.prompt_ids, *row.response_ids], tree.contexts(leaf), 1, 99, distinct_tokens
        )
        first = row.contexts[-1].start - len(PROMPT) if row.contexts else len(row.response_mask)
        row.response_mask[first:] = [0] * (len(row.response_mask) - first)
        rewards, mask = row.as_dict()["rm_scores"], np.array(row.response_mask)
        assert rewards.sum() == row.reward_score and rewards[mask.nonzero()[0][-1] + 1 :].sum() == 0
        cut += bool(row.contexts)
    assert cut
