"""HATO with tools: a step ends with a call and holds the result; bounds, masks and seeds are as without them."""

import asyncio
import re

import pytest

from recipe.hato.keys import HATOConfig, TreeConfig, UncertaintyConfig
from recipe.hato.local_reward import heuristic
from recipe.hato.tree import Policy
from recipe.hato.value_model import value_model_of
from tests.recipe.arpo import toy_agent
from tests.recipe.arpo.toy_agent import PROMPT, TOKENIZER, Library, ToyPolicy, encode, library, library_tools, texts
from verl.workers.rollout.trajectory_tree import MODEL, TOOL, Segment
from verl.workers.rollout.tree_rollout import rows_of

THOUGHTS = {"step_delimiter": "</think>"}  # a turn is a thought and a call, or a thought and an answer


def config_of(**tree) -> HATOConfig:
    shape = {"max_depth": 3, "max_step_tokens": 60, "max_nodes": 60} | tree
    return HATOConfig(tree=TreeConfig(**shape), uncertainty=UncertaintyConfig(entropy_top_k=4))


def policy_of(config, local_reward=heuristic) -> Policy:
    return Policy(config, value_model_of(config, 0), local_reward, TOKENIZER.decode)


def grown(engine, config, environment=None, local_reward=heuristic):
    return toy_agent.grow(engine, policy_of(config, local_reward), 6, environment or library_tools(), max_tokens=300)


def text_of(segments) -> str:
    return TOKENIZER.decode([token for segment in segments for token in segment.token_ids])


def steps_of(tree, leaf) -> list[list[Segment]]:
    """The segments of each step on the way to a leaf: a step begins where there is a value."""
    steps = []
    for i in tree.path(leaf):
        if "value" in tree.segments[i].info.notes:
            steps.append([])
        steps[-1].append(tree.segments[i])
    return steps


def test_a_step_ends_with_a_call_and_its_result_belongs_to_it():
    tree = grown(ToyPolicy(calls=2), config_of())
    assert len(tree.leaves) == 6
    for leaf in tree.leaves:
        first, *others, last = steps_of(tree, leaf)
        for step in (first, *others):
            assert [segment.author for segment in step] == [MODEL, TOOL]
            assert text_of(step[:1]).endswith("</search>") and text_of(step[1:]).startswith(" <result>\nabout ")
        assert text_of(last).endswith("</answer><|im_end|>")
        assert len(others) == 1 and [segment.author for segment in last] == [MODEL]
    for i, segment in enumerate(tree.segments):
        if segment.author == TOOL:
            siblings = [other for other in tree.segments if other.parent == segment.parent]
            assert siblings == [segment], "a result is the only child of its step"
            assert segment.info.calls[0]["tool"] == "search" and "value" not in segment.info.notes, i
    assert tree.metrics["tool_calls"] == sum(segment.author == TOOL for segment in tree.segments)


def test_a_step_also_ends_at_the_delimiter_and_the_tool_is_called_in_the_next():
    tree = grown(ToyPolicy(calls=1), config_of(max_depth=4, **THOUGHTS))
    for leaf in tree.leaves:
        steps = steps_of(tree, leaf)
        begun = [re.sub("^.<", "<", text_of(step)[:8]) for step in steps]
        assert begun == ["<think>", "<search>", "<think>", "<answer>"]
        assert [len(step) for step in steps] == [1, 2, 1, 1]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_that_runs_to_the_end_goes_through_all_its_calls(depth):
    tree = grown(ToyPolicy(calls=3), config_of(max_depth=depth))
    for leaf, text in zip(tree.leaves, texts(tree), strict=True):
        steps = steps_of(tree, leaf)
        assert len(steps) == depth and text.count("<result>") == 3 and text.endswith("</answer><|im_end|>")
        turns = 3 - (depth - 1)
        assert [segment.author for segment in steps[-1]] == [MODEL, TOOL] * turns + [MODEL]


@pytest.mark.parametrize("depth", [2, 4])
@pytest.mark.parametrize("cut", range(1, 45))
def test_paths_go_on_after_a_text_that_only_looked_like_the_end_of_a_call(cut, depth):
    """Steps are cut anywhere: after a `<` the engine is told to stop at `/search>`."""
    policy = ToyPolicy(calls=1, query="{0}< {0}/search> {0}")
    tree = grown(policy, config_of(max_depth=depth, max_step_tokens=cut))
    for text in texts(tree):
        letter = text[0]
        assert f"about {letter}< {letter}/search> {letter}" in text and text.endswith("</answer><|im_end|>")


class OneLetter(ToyPolicy):
    """Every answer begins with the same letter."""

    def _rest(self, begun, seed, results):
        return encode(self.turn("a", results))[len(encode(begun)) :]


class Moods(Library):
    """Never the same answer twice."""

    async def execute(self, content, *, timeout):
        await asyncio.sleep(0)
        self.asked.append(content)
        return f"{content} {len(self.asked)}"


def test_identical_siblings_with_identical_results_are_one_step_and_call_once():
    tools = library()
    tree = grown(OneLetter(calls=2), config_of(branching_factor=3, spread_leaves=False), library_tools(tools))
    assert len(tree.leaves) == 1 and tools.tools["search"].asked == ["a", "a"]
    assert [step[0].info.fields["draws"] for step in steps_of(tree, tree.leaves[0])] == [3, 3, 3]
    (row,) = rows_of(tree, policy_of(config_of()))
    draws = dict(zip(row.token_fields["segment_ids"], row.token_fields["draws"], strict=True))
    assert list(draws.values()) == [3, 1, 3, 1, 3], "a result was not drawn: only its step counts"


def test_identical_siblings_share_a_result_that_would_differ_and_others_do_not():
    tools = library()
    tools.tools["search"] = Moods()
    tree = grown(OneLetter(calls=1), config_of(branching_factor=3, spread_leaves=False), library_tools(tools))
    assert len(tree.leaves) == 1 and tools.tools["search"].asked == ["a"]
    # last steps are drawn as a whole: each makes its own calls
    tree = grown(OneLetter(calls=2), config_of(max_depth=1, branching_factor=3), library_tools(tools))
    assert len(tree.leaves) == 3 and len(tools.tools["search"].asked) == 7
    assert len(set(texts(tree))) == 3 and {len(steps_of(tree, leaf)) for leaf in tree.leaves} == {1}


def test_a_local_reward_sees_results_before_a_step_and_inside_it_but_not_the_one_that_ends_it():
    seen = {}

    def local(step):
        text = step.decode(step.tokens)
        seen[text] = step.decode(step.before), step.decode(step.parent)
        return 0.9 if "answer" in text else 0.3

    tree = grown(ToyPolicy(calls=2), config_of(max_depth=2), local_reward=local)
    for leaf in tree.leaves:
        first, last = steps_of(tree, leaf)
        assert seen[text_of(first[:1])] == ("", TOKENIZER.decode(PROMPT))
        assert seen[text_of(last)] == (text_of(first), text_of(first[:1])) and text_of(last).count("<result>") == 1
    for leaf, row in zip(tree.leaves, rows_of(tree, policy_of(config_of())), strict=True):
        sizes = [sum(len(segment.token_ids) for segment in step) for step in steps_of(tree, leaf)]
        assert row.token_fields["local_rewards"] == [0.3] * sizes[0] + [0.9] * sizes[1]
