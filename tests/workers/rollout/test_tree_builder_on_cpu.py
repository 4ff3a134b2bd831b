"""Tests of what all policies share (`grow`, `finish`, rows), and of the two policies that never branch."""

import asyncio

import pytest
import torch

from recipe.common.tree import Policy as Plain
from recipe.latr.over_generation import Policy as OverGeneration
from recipe.latr.over_generation import most_diverse
from tests.recipe.arpo.toy_agent import TOKENIZER, ToyPolicy, encode, library_tools
from tests.workers.rollout.toy_engine import CALL, EOS, VOCAB, Calls, Game, HashEngine, answer_to
from verl.utils.token_fields import TokenField
from verl.workers.rollout.engines.interface import Generation
from verl.workers.rollout.environment import NO_ENVIRONMENT
from verl.workers.rollout.trajectory_tree import TOOL, Segment, SegmentInfo, TrajectoryTree
from verl.workers.rollout.tree_builder import Path, Sampling, TreeBuilder, grow
from verl.workers.rollout.tree_rollout import rows_of

PROMPT = [3, 1]


def grown(policy, n=6, environment=NO_ENVIRONMENT, engine=None, max_tokens=40, seed=0, **more):
    options = {"max_tokens": max_tokens, "stop_token_ids": [EOS], "vocab_size": VOCAB, "seed": seed} | more
    return asyncio.run(grow(engine or HashEngine(3.0, 2), PROMPT, n, policy, environment=environment, **options))


@pytest.mark.parametrize("environment", [None, 2])
@pytest.mark.parametrize("seed", range(6))
def test_over_generation_keeps_the_most_different_of_the_plain_ones(seed, environment):
    def some():
        return NO_ENVIRONMENT if environment is None else Calls(environment)

    drawn = grown(Plain(), 9, some(), seed=seed).trajectories()
    tree = grown(OverGeneration(1.5), 6, some(), seed=seed)
    assert tree.trajectories() == [drawn[i] for i in most_diverse(drawn, 6)]
    kept = sum(len(row) for row in tree.trajectories())
    assert tree.metrics["kept_token_share"] == pytest.approx(kept / sum(map(len, drawn)))
    returned = {i for leaf in tree.leaves for i in tree.path(leaf)}
    assert all(("pruned" in segment.info.notes) == (i not in returned) for i, segment in enumerate(tree.segments))
    everything = grown(OverGeneration(1.0), 6, some(), seed=seed)
    assert everything.trajectories() == grown(Plain(), 6, some(), seed=seed).trajectories()


# ---- TreeBuilder ----


def finished(engine, path, seed=0, environment=None, max_tokens=40):
    builder = TreeBuilder(
        engine, PROMPT, max_tokens=max_tokens, stop_token_ids=[EOS], environment=environment or Calls(2)
    )
    return asyncio.run(builder.finish(path, seed))


def test_a_path_that_ends_with_a_call_or_has_ended_is_finished_from_there():
    engine = HashEngine(3.0, 2)
    calling = Path().then(Segment(None, [4, CALL]))
    first, *_ = finished(engine, calling)
    assert (first.author, first.token_ids) == (TOOL, answer_to([4, CALL], 37))
    assert finished(engine, Path().then(Segment(None, [4, EOS]))) == []
    assert finished(engine, Path().then(Segment(None, [4] * 40))) == []
    assert finished(engine, calling, environment=Calls(0)) == []


def test_a_lookalike_of_a_tags_rest_ends_no_turn():
    """The path ends within a closing tag, and the model goes on otherwise."""

    class Careless(ToyPolicy):
        def turn(self, first, results):
            return super().turn(first, results).replace("so", "</searc h>")

    begun = encode("x<think></searc")
    builder = TreeBuilder(
        Careless(calls=1),
        encode("assistant\n"),
        max_tokens=300,
        stop_token_ids=[TOKENIZER.eos_token_id],
        environment=library_tools(),
    )
    segments = asyncio.run(builder.finish(Path().then(Segment(None, begun)), seed=0))
    text = TOKENIZER.decode([*begun, *(token for segment in segments for token in segment.token_ids)])
    assert text.count("</searc h>") == 2 and text.count("<result>") == 1 and text.endswith("</answer><|im_end|>")


def test_requests_hold_what_was_asked_for():
    engine = HashEngine()
    builder = TreeBuilder(
        engine, PROMPT, max_tokens=9, stop_token_ids=[EOS, EOS], sampling=Sampling(0.7, 0.9, 5), request_id="u"
    )
    path = Path().then(Segment(None, [1, 2, 3]))
    options = ({"seed": 5}, {"max_tokens": 4, "greedy": True, "n_top_logprobs": 2}, {"seed": 1, "temperature": 0.1})
    for each in options:
        asyncio.run(builder.generate(path, **each))
    sampled, greedy, cool = engine.asked
    assert sampled.prompt_ids == [*PROMPT, 1, 2, 3] and sampled.stop_token_ids == [EOS]
    assert (sampled.temperature, sampled.top_p, sampled.top_k, sampled.seed) == (0.7, 0.9, 5, 5)
    assert sampled.max_tokens == 6 and sampled.request_id == "u" and sampled.stop == []
    assert (greedy.temperature, greedy.top_p, greedy.top_k, greedy.max_tokens) == (0, 1.0, -1, 4)
    assert greedy.n_top_logprobs == 2 and (cool.temperature, cool.top_p) == (0.1, 0.9)


def test_an_engine_without_tokens_and_groups_of_none_are_errors(monkeypatch):
    async def nothing(self, request):
        return Generation([], [])

    with pytest.raises(RuntimeError, match="no token after 0 of a response, 40 left"), monkeypatch.context() as patch:
        patch.setattr(HashEngine, "generate", nothing)
        grown(Plain())
    with pytest.raises(ValueError, match="n=0, a prompt of 2 tokens"):
        grown(Plain(), n=0)


# ---- rows ----


def test_rows_are_the_leaves_with_fields_of_every_token():
    class Scored(Plain):
        fields = (TokenField("r", "this test", unsent=0.5), TokenField("d", "this test", unsent=1))

    tree = TrajectoryTree([7])
    first = tree.add(Segment(None, [1, 2], [-0.1, -0.2], info=SegmentInfo(fields={"r": 0.25, "d": 3})))
    call = SegmentInfo(({"seconds": 1.5, "tool": "search"},))
    tool = tree.add(Segment(first, [8, 9], author=TOOL, info=call))
    left, right = (tree.add(Segment(tool, [token], [-0.5])) for token in (3, 4))
    tree.leaves = [right, left, first]
    rows = rows_of(tree, Scored(), {4, 3}, seconds=2.0)
    assert [row.response_ids for row in rows] == [[1, 2, 8, 9, 4], [1, 2, 8, 9, 3], [1, 2]]
    assert rows[0].response_mask == [1, 1, 0, 0, 1] and rows[0].prompt_ids == [7]
    assert rows[0].response_logprobs == [-0.1, -0.2, 0.0, 0.0, -0.5]
    assert [row.num_turns for row in rows] == [4, 4, 2]
    assert [row.metrics.tool_calls for row in rows] == [1.5, 1.5, 0.0]
    spans = [(row.extra_fields["min_global_steps"], row.extra_fields["max_global_steps"]) for row in rows]
    assert spans == [(3, 4)] * 3 and "min_global_steps" not in rows_of(tree, Scored())[0].extra_fields
    sent = rows[0].as_dict()
    assert sent["segment_ids"].tolist() == [first, first, tool, tool, right]
    assert sent["segment_ids"].dtype == torch.int64 and sent["d"].dtype == torch.int64
    assert sent["r"].tolist() == [0.25, 0.25, 0.5, 0.5, 0.5]
    assert sent["d"].tolist() == [3, 3, 1, 1, 1] and "token_fields" not in sent


# ---- an environment with state ----


def game_tree(game: Game, max_tokens=40):
    async def run():
        try:
            options = {"max_tokens": max_tokens, "stop_token_ids": [EOS], "environment": game}
            return await grow(HashEngine(1.5, 1000), PROMPT, 8, Plain(), **options)
        finally:
            await game.close()

    return asyncio.run(run())


def actions_of(tree, leaf) -> list[tuple[int, ...]]:
    """The turns of the model that the environment has answered, or that end with an end token."""
    turns: list[tuple[int, ...]] = [()]
    for segment in (tree.segments[i] for i in tree.path(leaf)):
        turns = [*turns, ()] if segment.author == TOOL else [*turns[:-1], (*turns[-1], *segment.token_ids)]
    return [turn for turn in turns if turn and turn[-1] == EOS]


def test_a_rows_reward_is_the_sum_of_its_turns():
    tree = game_tree(Game(call_limit=9))
    rows = rows_of(tree, Plain())
    turns = [len(actions_of(tree, leaf)) for leaf in tree.leaves]
    assert max(turns) > 1
    assert [row.extra_fields["turn_scores"] for row in rows] == [[float(i + 1) for i in range(n)] for n in turns]
    assert [row.reward_score for row in rows] == [float(sum(range(n + 1))) for n in turns]
    for row in rows:  # a turn's reward stands at its last token
        scores = row.as_dict()["rm_scores"].tolist()
        ends = [i for i, token in enumerate(row.response_ids) if token == EOS and row.response_mask[i]]
        assert [scores.pop(i) for i in reversed(ends)] == row.extra_fields["turn_scores"][::-1] and not any(scores)


def test_a_lost_branch_is_no_row_and_the_others_stay():
    whole = game_tree(Game(call_limit=9))
    first_actions = [actions_of(whole, leaf)[0] for leaf in whole.leaves if actions_of(whole, leaf)]
    lost = first_actions[0]
    fails = Game(call_limit=9, fault=lambda actions, _: OSError("gone") if actions[0] == lost else None)
    tree = game_tree(fails)
    kept = [
        row for row, leaf in zip(whole.trajectories(), whole.leaves, strict=True) if lost not in actions_of(whole, leaf)
    ]
    assert tree.trajectories() == kept and len(kept) < len(whole.leaves)
    assert tree.metrics["environment/failures"] == first_actions.count(lost) == 1


def test_a_tree_whose_branches_are_all_lost_fails():
    with pytest.raises(RuntimeError, match="the environment lost every trajectory: .*OSError: gone"):
        game_tree(Game(fault=lambda *_: OSError("gone")), max_tokens=200)
