"""DEEP-GRPO continues trajectories that failed from drawn ends of their steps, later ones more often."""

import math
from collections import Counter

import pytest

from recipe.compared.deep_grpo.tree import PIVOTS, DeepGRPOKeys, Fit, Policy, pivot_weights
from tests.recipe.arpo.toy_agent import TOKENIZER, ToyPolicy, library, library_tools
from tests.recipe.compared.engines import CHAT, Script, grown_by, letter, odd, scoring
from tests.workers.rollout.toy_engine import EOS, HashEngine, Letters
from verl.workers.rollout.prompt_task import PromptSettings, PromptTask
from verl.workers.rollout.trajectory_tree import TOOL
from verl.workers.rollout.tree_rollout import rows_of


def grown(engine, reward_of=odd, fit=None, text_of=letter, of_builder=None, **keys):
    """The tree, its rows, the policy, and the trajectories that were scored."""
    keys = DeepGRPOKeys(**{"chains": 4, "branches": 3, "step_delimiter": "c", "max_step_tokens": 6} | keys)
    score, scored = scoring(reward_of)
    task = PromptTask({}, settings=PromptSettings(tree=(Fit(*fit),) if fit else ()))
    policy = Policy(keys, text_of).for_task(task, score)
    tree = grown_by(policy, engine, keys.chains + keys.max_failures * keys.branches, **(of_builder or {}))
    return tree, rows_of(tree, policy), policy, scored


def ends_of_steps(text, most=6):
    """Lengths at which a step ends, the last one's included, letter by letter."""
    ends, begun = [], 0
    for at in range(1, len(text) + 1):
        if text[at - 1] == "c" or at - begun == most or at == len(text):
            ends.append(at)
            begun = at
    return ends


@pytest.mark.parametrize("seed", range(8))
def test_branches_go_on_from_a_step_of_a_failed_trajectory(seed):
    engine = HashEngine(sharpness=1.5, memory=100)
    tree, rows, policy, scored = grown(engine, of_builder={"seed": seed})
    responses = [row.response_ids for row in rows]
    pivots = [row.token_fields[PIVOTS.name] for row in rows]
    assert scored == responses[:4]
    failed = [tokens for tokens in scored if not odd(tokens)]
    assert tree.metrics["failed_chains"] == len(failed)
    n_pivots = min(2, len(failed))
    positions = policy.data_for_trainer(tree).positions
    assert len(positions) == n_pivots
    assert all(set(row) == {0} for row in pivots[: 10 - 3 * n_pivots]), "the others are main trajectories"
    for number in range(1, n_pivots + 1):
        chain = failed[number - 1]
        nodes = [0, *ends_of_steps(Letters().decode(chain))]
        first = 10 - 3 * n_pivots + 3 * (number - 1)
        for response, row_pivots in list(zip(responses, pivots, strict=True))[first : first + 3]:
            forked = row_pivots.index(number)
            assert row_pivots == [0] * forked + [number] * (len(response) - forked)
            assert response[:forked] == chain[:forked] and forked in nodes[:-1]
            assert positions[number - 1] == (nodes.index(forked) + 1) / len(nodes)
    assert len(engine.asked) == 10 and len({request.seed for request in engine.asked}) == 10


def test_a_threshold_says_what_has_failed():
    """The warm start's reward for a wrong answer in the right format is above 0."""
    for threshold, failed in ((0.0, 0), (0.1, 4)):
        tree, *_ = grown(HashEngine(), lambda tokens: 0.1, failure_threshold=threshold)
        assert tree.metrics["failed_chains"] == failed


def test_the_weights_by_hand():
    """Four nodes, of which the last one is no pivot, gamma 2 and P 1: 1/14, 4/14, 9/14."""
    weights = pivot_weights(4, 2.0, None)
    assert [weight / sum(weights) for weight in weights] == pytest.approx([1 / 14, 4 / 14, 9 / 14])
    fitted = pivot_weights(4, 1.0, (0.5, -3.0))
    expected = [x / (1 + math.exp(-(0.5 - 3.0 * x))) for x in (0.25, 0.5, 0.75)]
    assert fitted == pytest.approx(expected)
    assert pivot_weights(2, 2.0, None) == [0.25], "the only step is no pivot, the prompt is"


@pytest.mark.parametrize("fit", [None, (1.0, -6.0)])
def test_pivots_are_drawn_by_these_weights(fit):
    """Three steps, of 1, 3 and 2 tokens, after the prompt."""
    n = 2000
    script = Script([2, 0, 1, 2, 5, EOS])
    _, rows, _, _ = grown(script, lambda tokens: 0.0, fit=fit, chains=n, max_failures=n, branches=1)
    drawn = Counter(row.token_fields[PIVOTS.name].count(0) for row in rows[n:])
    weights = dict(zip((0, 1, 4), pivot_weights(4, 2.0, fit), strict=True))
    assert drawn.keys() == weights.keys()
    for forked, weight in weights.items():
        share = weight / sum(weights.values())
        assert abs(drawn[forked] / n - share) < 4 * math.sqrt(share / n)


def test_branches_that_begin_as_the_failed_trajectory_did_are_nodes_of_their_own():
    tree, rows, _, _ = grown(Script([1, 2, 4, 2, EOS]), lambda tokens: 0.0)
    assert {tuple(row.response_ids) for row in rows} == {(1, 2, 4, 2, EOS)}
    ends = [row.token_fields["segment_ids"][-1] for row in rows]
    assert len(set(ends)) == len(rows)


@pytest.mark.parametrize("limit", [1, 2])
def test_with_tools_no_call_is_made_twice(limit):
    tools, engine = library({"call_limit": limit}), ToyPolicy(calls=2)
    options = {"step_delimiter": "think", "max_step_tokens": 20, "text_of": lambda t: TOKENIZER.decode([t])}
    builder = {"prompt": CHAT, "environment": library_tools(tools), "max_tokens": 400, "stop": TOKENIZER.eos_token_id}
    tree, rows, policy, _ = grown(engine, lambda tokens: 0.0, of_builder=builder, **options)
    begun = [TOKENIZER.decode(request.prompt_ids[len(CHAT) :]) for request in engine.requests]
    assert not any(text.endswith("</search>") for text in begun)
    results = [segment for segment in tree.segments if segment.author == TOOL]
    assert len(results) == len(tools.tools["search"].asked)
    texts = [TOKENIZER.decode(row.response_ids) for row in rows]
    assert all(text.count("<result>") == min(limit, 2) for text in texts)
    assert len(policy.data_for_trainer(tree).positions) == 2
