"""Whether an answer's likelihood tells right from wrong: by hand, and on a real tokenizer and model."""

import asyncio

import numpy as np
import pytest
import torch
from tqdm import tqdm

from recipe.common.reporting.exploration_report import likelihood_table
from tests.evaluation.exploration.random_model import model_and_tokenizer
from verl.evaluation.exploration.likelihoods import SHARES, likelihood_rows, references_by_prompt
from verl.evaluation.exploration.table import Certainty, SampledGroup, Trajectory
from verl.workers.rollout.answer_likelihood import AnswerLikelihood, answer_tokens, reference_answers
from verl.workers.rollout.engines.interface import RolloutEngine
from verl.workers.rollout.engines.local_transformers import TransformersEngine

STEP = Certainty(1.0, 0.5, 0.2)


def row(truth) -> dict:
    return {"reward_model": {"ground_truth": truth}}


def test_references_are_answers_and_no_descriptions_of_tasks():
    assert reference_answers(row("42")) == ["42"] and reference_answers(row(1912)) == ["1912"]
    assert reference_answers(row(np.array(["Paris", "Lutetia"]))) == ["Paris", "Lutetia"]
    for truth in ({"target": 9, "numbers": [1, 2]}, '{"target": 9, "numbers": [1]}', None, ""):
        with pytest.raises(ValueError, match="ground_truth"):
            reference_answers(row(truth))


def test_a_wrong_answer_is_another_rows_that_is_no_reference_of_this_one():
    rows = [row("1"), row(["2", "1"]), row("1"), row("3")]
    assert references_by_prompt(rows) == [(["1"], ["3"]), (["2", "1"], ["3"]), (["1"], ["3"]), (["3"], ["1"])]
    assert references_by_prompt([row("1"), row("1")]) is None, "no other answer"
    assert references_by_prompt([row("1"), row({"target": 1})]) is None


class Words:
    """A tokenizer of words, of which " is 4" is one."""

    def encode(self, text, add_special_tokens=False):
        return [hash(word) for word in text.replace(" is 4", "| is 4|").replace(" ", "| ").split("|") if word.strip()]


def test_a_token_with_the_end_of_the_closing_text_belongs_to_the_answer():
    tokenizer = Words()
    closing, answer = answer_tokens(tokenizer, " it is ", "5")
    assert closing == tokenizer.encode(" it is") and answer == [hash(" 5")]
    model, tokenizer = model_and_tokenizer()
    closing, answer = answer_tokens(tokenizer, " The answer is ", "17")
    assert tokenizer.decode([*closing, *answer]) == " The answer is 17" and answer
    assert answer_tokens(tokenizer, "", "17") == ([], tokenizer.encode("17", add_special_tokens=False))


def test_the_likelihood_is_the_models_of_the_most_likely_reference():
    model, tokenizer = model_and_tokenizer()
    before = tokenizer.encode("2 + 3 = ?", add_special_tokens=False)
    engine = TransformersEngine(model)
    likelihood = AnswerLikelihood(engine.score, tokenizer, " = ", ["5", "seven"])
    found = asyncio.run(likelihood.log_prob(before))
    each = []
    for text in ("5", "seven"):
        opening = [*before, *tokenizer.encode(" = ", add_special_tokens=False)]
        tokens = [*opening, *tokenizer.encode(text, add_special_tokens=False)]
        with torch.no_grad():
            log_probs = model(torch.tensor([tokens])).logits[0].double().log_softmax(-1)
        each.append(np.mean([float(log_probs[i - 1, tokens[i]]) for i in range(len(opening), len(tokens))]))
    assert found == pytest.approx(max(each), abs=1e-4)


class Foreseeing(RolloutEngine):
    """Scores a continuation by the last token before it; of a response's beginning the score is that of its tokens."""

    async def generate(self, request):
        raise AssertionError("nothing is generated")

    async def score(self, prompt_ids, continuation_ids, request_id=None):
        if len(prompt_ids) == 1:  # the beginning of a response
            return [-float(token) for token in continuation_ids]
        return [-float(prompt_ids[-1])] * len(continuation_ids)


def test_rows_by_hand():
    """The right response ends lower from its half on, and the wrong one has a tool's token, which is not counted."""
    right = Trajectory([5, 4, 3, 2], [STEP] * 4, True, "1")
    wrong = Trajectory([1, 7, 8, 9], [STEP, None, STEP, STEP], False, "2")
    mixed, all_right = SampledGroup([0], [right, wrong], 8), SampledGroup([0], [right, right], 8)
    references = [(["1"], ["2"]), (["2"], ["1"])]
    bar = tqdm(total=0, disable=True)
    rows = asyncio.run(likelihood_rows(Foreseeing(), Words(), "", [mixed, all_right], references, bar))
    assert [row["share"] for row in rows] == list(SHARES) and {row["groups"] for row in rows} == {1}
    # after 1, 2 and 3 tokens the last ones are 5 and 1, 4 and 7, 3 and 8
    assert [row["reference"] for row in rows] == [0.0, 1.0, 1.0] == [row["wrong answer"] for row in rows]
    # means of 5 and 1; 4.5 and 1; 4 and 4.5
    assert [row["beginning"] for row in rows] == [0.0, 0.0, 1.0]
    page = likelihood_table(rows)
    assert "| 50% | 1.00 (1.00 to 1.00) |" in page and "reaches 0.65: 50%." in page
    assert asyncio.run(likelihood_rows(Foreseeing(), Words(), "", [all_right], references[:1], bar)) == []
    assert likelihood_table([]) == ""
