"""Tree-GRPO continues trajectories from ends of their steps; its advantage against a slow version."""

from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch

from recipe.compared.tree_grpo.tree import Policy, TreeGRPOKeys
from tests.recipe.arpo.toy_agent import TOKENIZER, ToyPolicy, library, library_tools
from tests.recipe.compared import credit
from tests.recipe.compared.engines import CHAT, Recorder, Script, grown_by, letter
from tests.workers.rollout.toy_engine import EOS, HashEngine, Letters
from verl.workers.rollout.trajectory_tree import TOOL


def grown(engine, seed=0, text_of=letter, of_builder=None, **keys):
    keys = TreeGRPOKeys(**{"step_delimiter": "c"} | keys)
    n = keys.M * (1 + keys.N * keys.L)
    return grown_by(Policy(keys, text_of), engine, n, seed=seed, **(of_builder or {}))


def ends_of_steps(text):
    """The prefixes of a text after each c but one that ends it."""
    return {text[: at + 1] for at in range(len(text) - 1) if text[at] == "c"}


@pytest.mark.parametrize(
    "shape", [{"M": 3, "N": 2, "L": 1}, {"M": 2, "N": 3, "L": 3}, {"M": 1, "N": 1, "L": 4}], ids=str
)
@pytest.mark.parametrize("seed", range(5))
def test_trajectories_go_on_from_ends_of_steps_of_their_tree(seed, shape):
    engine = Recorder(HashEngine(sharpness=1.5, memory=100))
    tree = grown(engine, seed=seed, **shape)
    texts = [Letters().decode(row) for row in tree.trajectories()]
    asked = Counter(Letters().decode(prompt[3:]) for prompt in engine.asked)
    assert asked.total() == len(texts)
    for start in range(0, len(texts), len(texts) // shape["M"]):
        of_tree = texts[start : start + len(texts) // shape["M"]]
        known = of_tree[:1]
        asked[""] -= 1
        for _ in range(shape["L"]):
            steps = {step for text in known for step in ends_of_steps(text)} or {""}
            drawn = of_tree[len(known) : len(known) + shape["N"]]
            for text in drawn:
                # several requests may have led to a text
                assert any(text.startswith(step) and asked[step] > 0 for step in steps)
            known += drawn


def test_every_end_of_a_step_is_drawn_alike_and_no_other_place():
    """A round has 200 draws, so that each end comes often. In the second round an end that many share counts once."""
    engine = Recorder(Script([2, 0, 2, 1, 2, 2, 5, EOS]))
    grown(engine, M=1, N=200, L=2)
    for of_round in (engine.asked[1:201], engine.asked[201:]):
        drawn = Counter(len(prompt) - 3 for prompt in of_round)
        assert drawn.keys() == {1, 3, 5, 6} and min(drawn.values()) > 30


def test_a_delimiter_may_lie_across_tokens():
    tokens = [2, 5, 7, 1, 9, 5, 2, 1, EOS]
    texts = {2: "so\n", 5: "\nand", 7: "\n\n", 9: "a\n\nb"}
    engine = Recorder(Script(tokens))
    grown(engine, text_of=lambda token: texts.get(token, "."), M=1, N=50, step_delimiter="\n\n")
    assert {len(prompt) - 3 for prompt in engine.asked[1:]} == {2, 3, 5}


def tree_of_row(tree):
    """Return the index of each trajectory's first segment."""
    return [ids[0] for ids in tree.segment_ids()]


def test_equal_trajectories_of_two_trees_are_not_merged():
    tree = grown(Script([1, 2, 4, 2, EOS]), M=3, N=2, L=1)
    assert tree.trajectories() == [[1, 2, 4, 2, EOS]] * 9
    first = tree_of_row(tree)
    assert [first.index(i) for i in first] == [0, 0, 0, 3, 3, 3, 6, 6, 6]


def test_a_tree_of_one_step_is_followed_by_trees_from_the_prompt():
    engine = Recorder(HashEngine())
    tree = grown(engine, M=2, N=2, L=2, step_delimiter="never")
    assert engine.asked == [(1, 2, 3)] * 10 and len(set(tree_of_row(tree))) == 10


# ---- with tools ----


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_with_tools_a_step_ends_at_a_result_and_its_call_is_made_once(limit):
    tools, policy = library({"call_limit": limit}), Recorder(ToyPolicy(calls=2))
    builder = {"prompt": CHAT, "environment": library_tools(tools), "max_tokens": 400, "stop": TOKENIZER.eos_token_id}
    tree = grown(policy, of_builder=builder, M=2, N=3, L=2, step_delimiter="think")
    texts = [TOKENIZER.decode(row) for row in tree.trajectories()]
    assert all(text.count("<result>") == min(limit, 2) for text in texts)
    begun = [TOKENIZER.decode(prompt[len(CHAT) :]) for prompt in policy.asked]
    # whole turns, from the prompt or a result on
    assert all(text == "" or text.endswith("\n</result>") for text in begun)
    assert begun.count("") == 2 and len(begun) > 2 * 3
    # a call for each turn that was written and could make one, and none for a turn that trajectories share
    assert len(tools.tools["search"].asked) == sum(text.count("</result>") < min(limit, 2) for text in begun)
    results = [TOKENIZER.decode(segment.token_ids) for segment in tree.segments if segment.author == TOOL]
    assert all(text.startswith(" <result>") and text.endswith("</result>") for text in results)
    assert len(set(tree_of_row(tree))) == 2


advantage = partial(credit.advantage, "tree_grpo")


@pytest.mark.parametrize("seed", range(4))
def test_against_a_slow_version(seed):
    generator = np.random.default_rng(seed)
    trees, index = generator.integers(0, 4, 40), generator.integers(0, 4, 40)
    scores = generator.random(40).astype(np.float32)
    # the tree's first segment, then the row's own
    ids = torch.stack([torch.from_numpy(trees), torch.arange(40) + 100], dim=1)
    fast = advantage(scores.tolist(), ids, index.tolist())
    for i in range(40):
        expected = 0.0
        for members in (
            [j for j in range(40) if index[j] == index[i]],
            [j for j in range(40) if index[j] == index[i] and trees[j] == trees[i]],
        ):
            if len(members) > 1:
                expected += (scores[i] - scores[members].mean()) / scores[members].std(ddof=1)
        assert fast[i].tolist() == pytest.approx([expected] * 2, abs=1e-3)
