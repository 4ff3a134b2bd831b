"""The reference answer's likelihood on a real tokenizer and model, and its gains: of toy trees by hand."""

import asyncio
import math

import numpy as np
import pytest
import torch

from recipe.common.tree import Policy as Plain
from tests.configs import composed
from tests.evaluation.exploration.random_model import model_and_tokenizer
from tests.workers.rollout.toy_engine import EOS, VOCAB, Calls, HashEngine
from verl.workers.config.explore import needs_answers
from verl.workers.rollout.answer_likelihood import (
    CLOSING,
    CLOSING_WITH_TOOLS,
    AnswerLikelihood,
    answer_gains,
    answer_tokens,
    closing_text,
    reference_answers,
)
from verl.workers.rollout.engines.local_transformers import TransformersEngine
from verl.workers.rollout.trajectory_tree import TOOL, Segment, SegmentInfo, TrajectoryTree
from verl.workers.rollout.tree_builder import grow

PROMPT = [3, 1]


class Letter:
    """A tokenizer of one token for each letter."""

    def encode(self, text, add_special_tokens=False):
        return [ord(letter) - ord("a") for letter in text]


def test_references_are_answers_and_no_descriptions_of_tasks():
    def references(truth) -> list[str]:
        return reference_answers({"reward_model": {"ground_truth": truth}})

    assert references("42") == ["42"] and references(1912) == ["1912"]
    assert references(np.array(["Paris", "Lutetia"])) == ["Paris", "Lutetia"]
    for truth in ({"target": 9, "numbers": [1, 2]}, '{"target": 9, "numbers": [1]}', None, ""):
        with pytest.raises(ValueError, match="ground_truth"):
            references(truth)


class Words:
    """A tokenizer of words, of which " is 4" is one."""

    def encode(self, text, add_special_tokens=False):
        return [hash(word) for word in text.replace(" is 4", "| is 4|").replace(" ", "| ").split("|") if word.strip()]


def test_a_token_with_the_end_of_the_closing_text_belongs_to_the_answer():
    closing, answer = answer_tokens(Words(), " it is ", "5")
    assert closing == Words().encode(" it is") and answer == [hash(" 5")]
    _, tokenizer = model_and_tokenizer()
    closing, answer = answer_tokens(tokenizer, " The answer is ", "17")
    assert tokenizer.decode([*closing, *answer]) == " The answer is 17" and answer
    assert answer_tokens(tokenizer, "", "17") == ([], tokenizer.encode("17", add_special_tokens=False))


def test_the_likelihood_is_the_models_of_the_most_likely_reference():
    model, tokenizer = model_and_tokenizer()
    before = tokenizer.encode("2 + 3 = ?", add_special_tokens=False)
    of_answer = AnswerLikelihood(TransformersEngine(model).score, tokenizer, " = ", ["5", "seven"])
    opening = [*before, *tokenizer.encode(" = ", add_special_tokens=False)]
    each = []
    for text in ("5", "seven"):
        tokens = [*opening, *tokenizer.encode(text, add_special_tokens=False)]
        with torch.no_grad():
            log_probs = model(torch.tensor([tokens])).logits[0].double().log_softmax(-1)
        each.append(np.mean([float(log_probs[i - 1, tokens[i]]) for i in range(len(opening), len(tokens))]))
    assert asyncio.run(of_answer.log_prob(before)) == pytest.approx(max(each), abs=1e-4)


def likelihood(score, answers=("c",)) -> AnswerLikelihood:
    return AnswerLikelihood(score, Letter(), "b", answers)


async def by_length(before, continuation):
    """The longer the beginning, the likelier; b is the closing text."""
    assert before[:2] == PROMPT and before[-1] == 1
    return [-1.0 / (len(before) - 2) - continuation[0] for _ in continuation]


def test_gains_stand_at_the_ends_of_turns_and_shared_beginnings_are_scored_once():
    asked = []

    async def score(before, continuation):
        asked.append((tuple(before), tuple(continuation)))
        return await by_length(before, continuation)

    tree = TrajectoryTree(PROMPT)
    call = tree.add(Segment(None, [5, 6], [0.0, 0.0]))
    result = tree.add(Segment(call, [7], author=TOOL))
    tree.leaves = [tree.add(Segment(result, [8, 9], [0.0, 0.0]))]
    more = tree.add(Segment(result, [4], [0.0]))
    tree.leaves.append(tree.add(Segment(tree.add(Segment(more, [7, 7], author=TOOL)), [9], [0.0])))
    for log_prob in (True, False):
        gains = asyncio.run(answer_gains(tree, likelihood(score, answers=("d", "c")), log_prob))

        def value(length: int, log_prob=log_prob) -> float:
            actual = -1.0 / (length + 1) - 2  # c is likelier than d
            return actual if log_prob else math.exp(actual)

        first = value(3) - value(0)
        assert gains[0] == pytest.approx([math.nan, math.nan, first, math.nan, math.nan], nan_ok=True)
        second = value(6) - value(3)
        expected = [math.nan, math.nan, first, math.nan, math.nan, second, math.nan]
        assert gains[1] == pytest.approx(expected, nan_ok=True)
    assert len(asked) == 2 * 2 * 3, "after the prompt and after two results, for two answers"


@pytest.mark.parametrize(("context", "left_out"), [(8, 0), (7, 1), (4, 3)])
def test_likelihoods_that_do_not_fit_into_the_context_are_left_out_and_counted(context, left_out):
    """Three beginnings of 2, 3 and 5 tokens, each with a closing token, an answer, and a token that vLLM generates."""

    async def score(before, continuation):
        assert len(before) + len(continuation) + 1 <= context, "vLLM refuses the request"
        return [-1.0 for _ in continuation]

    ends = SegmentInfo(ends_step=True)
    tree = TrajectoryTree(PROMPT, [Segment(None, [5], [0.0], info=ends), Segment(0, [6, 7], [0.0] * 2, info=ends)], [2])
    tree.segments.append(Segment(1, [8], [0.0]))
    of_answer = AnswerLikelihood(score, Letter(), "b", ("c",), context)
    (gains,) = asyncio.run(answer_gains(tree, of_answer))
    nan = math.nan
    assert gains == pytest.approx({0: [0, nan, 0, nan], 1: [0, nan, nan, nan], 3: [nan] * 4}[left_out], nan_ok=True)
    assert of_answer.left_out == left_out


def test_a_trajectory_of_one_turn_has_no_gain():
    tree = TrajectoryTree(PROMPT, [Segment(None, [5, 6], [0.0, 0.0], info=SegmentInfo(ends_step=True))], [0])
    (gains,) = asyncio.run(answer_gains(tree, likelihood(by_length)))
    assert all(map(math.isnan, gains))


def test_gains_of_turns_with_tools_add_up():
    engine = HashEngine(3.0, 2)

    def log_prob(*tokens) -> float:
        return math.log(engine.probabilities(tokens[:-1])[tokens[-1]])

    async def score(before, continuation):
        return [log_prob(*before, *continuation[: at + 1]) for at in range(len(continuation))]

    def best(*before) -> float:
        """Return by hand the mean log-prob of the likelier answer, k or c d, after the closing text b."""
        read = [*PROMPT, *before, 1]
        return max(log_prob(*read, 10), (log_prob(*read, 2) + log_prob(*read, 2, 3)) / 2)

    async def growing():
        options = {"max_tokens": 40, "stop_token_ids": [EOS], "vocab_size": VOCAB, "environment": Calls(3)}
        tree = await grow(engine, PROMPT, 6, Plain(), **options)
        return tree, await answer_gains(tree, likelihood(score, answers=("k", "cd")), log_prob=True)

    tree, gains = asyncio.run(growing())
    ends = 0
    for row, mask, tokens in zip(gains, tree.response_masks(), tree.trajectories(), strict=True):
        places = [at for at, gain in enumerate(row) if not math.isnan(gain)]
        ends += len(places)
        for at in places:
            assert mask[at] == 0 and mask[at + 1] == 1, "a turn ends with a result"
            assert sum(row[i] for i in places if i <= at) == pytest.approx(best(*tokens[: at + 1]) - best())
    assert ends


def test_runs_that_read_likelihoods_need_answers():
    plain = composed("explore")
    assert not needs_answers(plain) and closing_text(plain) == CLOSING
    credit = composed("explore", "credit=igpo", "environment=tools")
    assert needs_answers(credit) == "algorithm.adv_estimator=igpo" and closing_text(credit) == CLOSING_WITH_TOOLS
    own = composed("explore", "credit=igpo", "actor_rollout_ref.rollout.answer_closing='So: '")
    assert closing_text(own) == "So: "
