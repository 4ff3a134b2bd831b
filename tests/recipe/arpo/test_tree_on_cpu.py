"""Trees of tool-using trajectories: budgets, limits, masks, sharing; the same tree whoever is fast."""

import math

import pytest

from recipe.arpo.tree import ARPOConfig, Policy
from tests.recipe.arpo import toy_agent
from tests.recipe.arpo.toy_agent import TOKENIZER, Library, ToyPolicy, library, library_tools, texts
from verl.workers.rollout.tools.base_tool import ToolError
from verl.workers.rollout.trajectory_tree import MODEL, TOOL

ALWAYS = {"branch_probability": 1.0, "entropy_weight": 0.0}


def grow(engine, tools=None, n=8, call_limit=3, **config):
    config = ARPOConfig(**{"initial_rollouts": 4, "entropy_tokens": 4, "entropy_top_k": 4} | config)
    environment = library_tools(tools)
    environment.call_limit = call_limit
    return toy_agent.grow(engine, Policy(config, TOKENIZER.decode), n, environment)


@pytest.mark.parametrize(("n", "initial"), [(1, 8), (4, 8), (16, 8), (16, 1), (5, 5)])
@pytest.mark.parametrize("calls", [0, 1, 4])
@pytest.mark.parametrize("dynamic", [False, True])
def test_exactly_n_come_back(n, initial, calls, dynamic):
    tree = grow(ToyPolicy(calls=calls), n=n, initial_rollouts=initial, enable_dynamic_rollouts=dynamic)
    assert len(tree.leaves) == n == tree.metrics["initial_rollouts"] + tree.metrics["forks"] + tree.metrics["filled"]


def test_a_branch_shares_its_past_and_its_tool_calls():
    tools = library()
    tree = grow(ToyPolicy(calls=2), tools, n=8, initial_rollouts=4, **ALWAYS)
    assert tree.metrics["forks"] == 4 and tree.metrics["filled"] == 0
    first_calls = [s for s in tree.segments if s.author == TOOL and tree.segments[s.parent].parent is None]
    assert len(first_calls) == 4  # four trajectories to the first result, eight from there on
    seconds = [s for s in tree.segments if s.author == TOOL and tree.segments[s.parent].parent is not None]
    assert len(seconds) == 8
    assert len(tools.tools["search"].asked) == 12 == tree.metrics["tool_calls"]
    assert tree.metrics["tool_calls_per_trajectory"] == 2
    children = [s for s in tree.segments if s.parent is not None and tree.segments[s.parent] is first_calls[0]]
    assert [s.author for s in children] == [MODEL, MODEL] and children[0].token_ids != children[1].token_ids


def test_branches_go_to_the_uncertain():
    """Probability 0.5 + 2 (H after the result - H after the prompt): all fork, or none."""
    sure, unsure = (math.log(4), 0.0), (0.0, math.log(4))
    weight = 5 * math.log(len(TOKENIZER))
    assert grow(ToyPolicy(1, unsure), entropy_weight=weight).metrics["forks"] == 4
    assert grow(ToyPolicy(1, sure), entropy_weight=weight).metrics["forks"] == 0


def test_validation_asks_once_a_turn_and_for_no_entropies():
    policy = ToyPolicy(calls=2)
    tree = grow(policy, n=4, branch_policy="never", initial_rollouts=4)
    assert len(policy.requests) == 12 and not any(request.n_entropy for request in policy.requests)
    assert tree.metrics["forks"] == 0 and tree.metrics["shared_tokens"] == 0


def test_the_probe_sets_the_budget_and_is_one_of_the_n():
    # H_root 0, H_tool log 4 nats: 16 sigmoid(-0.5 log 4) = 16 / 3
    tree = grow(ToyPolicy(calls=1), n=16, enable_dynamic_rollouts=True, **ALWAYS)
    assert tree.metrics["initial_rollouts"] == 5
    assert tree.metrics["forks"] == 5 and tree.metrics["filled"] == 6 and len(tree.leaves) == 16
    keys = {tuple(segment.info.notes["key"]) for segment in tree.segments}
    assert (0, 1, 0) in keys  # the probe's own branch, decided after it had ended


def test_forks_in_a_row_are_penalized_on_their_path():
    config = {"branch_policy": "entropy_balanced", "branch_penalty": 1.0, "call_limit": 4, **ALWAYS}
    tree = grow(ToyPolicy(calls=4), n=64, initial_rollouts=1, **config)
    # with a penalty of 1 a fork never follows a fork: after calls 1 and 3 only
    keys = sorted({tuple(segment.info.notes["key"]) for segment in tree.segments if len(segment.info.notes["key"]) > 1})
    assert keys == [(0, 1, 0), (0, 1, 0, 3, 0), (0, 3, 0)]


def test_a_call_that_was_never_opened_is_told_and_counted():
    class Careless(ToyPolicy):
        def turn(self, first, results):
            return super().turn(first, results).replace("<search>", "search ")

    tree = grow(Careless(calls=1), n=1)
    assert "Error: search was closed but not opened" in texts(tree)[0] and tree.metrics["tool_failures"] == 1


@pytest.mark.parametrize("own_fault", [False, True])
def test_a_tools_failure_is_counted_kept_and_told_to_the_model(monkeypatch, own_fault):
    async def down(self, content, *, timeout):
        raise ToolError("the server is down", kind="connect", retry=False, own_fault=own_fault)

    monkeypatch.setattr(Library, "execute", down)
    tree = grow(ToyPolicy(calls=1), n=2, initial_rollouts=2)
    assert all(text.endswith("<|im_end|>") for text in texts(tree))
    assert all("Error: the server is down" in text for text in texts(tree))
    assert tree.metrics["tool_search/failures"] == 2 and tree.metrics["tool_search/own_faults"] == 2 * own_fault
    calls = [call for segment in tree.segments for call in segment.info.calls]
    assert [call["error"] for call in calls] == ["connect", "connect"]
    assert [call.get("fault") for call in calls] == ["Error: the server is down" if own_fault else None] * 2


@pytest.mark.parametrize("look", range(1, 40))
def test_text_like_the_rest_of_a_tag_ends_no_turn(look):
    """A request that ends after "</searc" makes "h>" a stop text: it ends the next request, but not the turn."""

    class Careless(ToyPolicy):
        def turn(self, first, results):
            return super().turn(first, results).replace("so", "</searc h>")

    (text,) = texts(grow(Careless(calls=1), n=1, entropy_tokens=look))
    assert text.count("</searc h>") == 2 and text.count("<result>") == 1 and text.endswith("</answer><|im_end|>")
