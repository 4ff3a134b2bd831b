"""Tests that hold for every tree, whatever its rule: on engines and environments of letters, with `smallest` settings.

from tests.conformance.trees import *  # noqa: F403

@pytest.fixture(params=["my_tree"])  # names of registered trees
def tree(request):
    return request.param
"""

import asyncio
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import cache
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf, open_dict

from tests.configs import composed, copied
from tests.workers.rollout.toy_engine import (
    CALL,
    EOS,
    VOCAB,
    Calls,
    Game,
    HashEngine,
    Letters,
    RewrittenGame,
    answer_to,
    game_step,
    rewritten,
)
from verl.trainer.checks.parts import check_parts, check_typed_sections
from verl.utils.parts import nested, parts
from verl.workers.config.keys import ROLLOUT
from verl.workers.rollout.environment import NO_ENVIRONMENT, Environment
from verl.workers.rollout.prompt_task import PromptTask
from verl.workers.rollout.trajectory_tree import MODEL, TrajectoryTree
from verl.workers.rollout.tree_builder import BranchPolicy, Score, grow
from verl.workers.rollout.tree_rollout import rows_of

PROMPT = [1, 2, 3]
PARAGRAPH = 2  # the token whose text ends a step
# in a game, end tokens end turns, and answers follow from all turns before
ENVIRONMENTS = ["none", "tools", "game"]
WITH_CONTEXTS = [*ENVIRONMENTS, "rewritten_game"]
CALL_LIMIT = 2


class Paragraphs(Letters):
    """The letters, but that one of them is two line breaks, which end a step by default."""

    def decode(self, tokens, skip_special_tokens=False):
        own = [token for token in tokens if token != EOS or not skip_special_tokens]
        return super().decode(own).replace(super().decode([PARAGRAPH]), "\n\n")


class ParagraphEngine(HashEngine):
    """A `HashEngine` that stops at texts of `Paragraphs`, and often ends a step or calls; every prefix has a
    distribution of its own."""

    def __init__(self, **options):
        super().__init__(**{"sharpness": 1.5, "memory": 1000} | options)

    def probabilities(self, tokens):
        return [0.8 * p + 0.1 * (token in (PARAGRAPH, CALL)) for token, p in enumerate(super().probabilities(tokens))]

    async def generate(self, request):
        generation = await super().generate(request)
        for end in range(1, len(generation.token_ids)):
            if any(text in Paragraphs().decode(generation.token_ids[:end]) for text in request.stop):
                return generation.first(end)
        return generation


def parity(tokens) -> float:
    """A reward that about half of the trajectories get."""
    return float(sum(tokens) % 2)


@cache
def config_of(tree: str, environment: str = "none") -> DictConfig:
    """A run's config with the tree's smallest settings, and as many trajectories as it grows, or six."""
    part, environment = parts("tree")[tree], "none" if environment == "none" else "tools"
    config = composed("explore", "hardware=cpu", f"tree={tree}", f"environment={environment}")
    with open_dict(config):
        config.merge_with(nested(part.smallest))
        config.actor_rollout_ref.rollout.n = 6
        if part.trajectories is not None:
            keys = part.keys(**OmegaConf.to_container(OmegaConf.select(config, part.section), resolve=True))
            config.actor_rollout_ref.rollout.n = part.trajectories(keys)
    return config


def scoring(reward_of: Callable = parity, slow: float = 0.0) -> Score:
    async def score(tokens, about):
        await asyncio.sleep(slow * (sum(tokens) % 5))
        return reward_of(tokens)

    return score


def policy_of(tree: str, environment: str = "none") -> BranchPolicy:
    policy = parts("tree")[tree].policy.from_config(config_of(tree, environment), Paragraphs())
    return policy.for_task(PromptTask({"raw_prompt": [], "uid": "a", "index": 0}, step=1))


def grown(
    tree: str, environment: str = "none", *, engine=None, answers=None, seed=0, max_tokens=30, **options
) -> tuple[TrajectoryTree, BranchPolicy]:
    """The tree and its policy; `options` are those of `scoring`."""
    policy, n = policy_of(tree, environment), config_of(tree, environment).actor_rollout_ref.rollout.n
    answers = answers or environment_of(environment)
    builder = {"max_tokens": max_tokens, "stop_token_ids": [EOS], "vocab_size": VOCAB, "seed": seed}
    builder["score"] = scoring(**options)

    async def run() -> TrajectoryTree:
        try:
            return await grow(engine or ParagraphEngine(), PROMPT, n, policy, environment=answers, **builder)
        finally:
            await answers.close()

    grown_tree = asyncio.run(run())
    if isinstance(answers, Game):
        assert answers.alive == 0 and answers.most_alive <= answers.pool.keys.max_instances
    return grown_tree, policy


def environment_of(name: str, **options) -> Environment:
    """A new environment; the game has fewer instances than trajectories."""
    if name == "none":
        return NO_ENVIRONMENT
    if name == "tools":
        return Calls(CALL_LIMIT, **options)
    return (Game if name == "game" else RewrittenGame)(CALL_LIMIT, max_instances=2, **options)


def same_beginning(a: list, b: list) -> int:
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


# ---- what a tree follows from ----


@pytest.mark.parametrize("environment", WITH_CONTEXTS)
def test_the_order_in_which_requests_end_does_not_change_the_tree(tree, environment):
    expected, _ = grown(tree, environment, seed=1)
    for order in range(4):
        engine, options = ParagraphEngine(delay=0.004, order=order), {"delay": 0.004, "order": order}
        if "game" in environment:
            options |= {"can_copy": order % 2 == 0}
        answers = environment_of(environment, **options)
        grown_tree, _ = grown(tree, environment, engine=engine, answers=answers, seed=1, slow=0.001 * order)
        assert without_counts(grown_tree) == without_counts(expected)


def test_prompts_side_by_side_grow_the_trees_that_each_grows_alone(tree):
    """One policy serves all prompts of a worker."""
    config = config_of(tree, "tools")
    policy = parts("tree")[tree].policy.from_config(config, Paragraphs())
    options = {"max_tokens": 30, "stop_token_ids": [EOS], "vocab_size": VOCAB, "score": scoring()}

    async def together(*seeds):
        engine, prompts = ParagraphEngine(delay=0.002), []
        for seed in seeds:
            own = policy.for_task(PromptTask({"raw_prompt": [], "uid": "a", "index": seed}, step=1))
            n, answers = config.actor_rollout_ref.rollout.n, Calls(CALL_LIMIT)
            prompts.append(grow(engine, PROMPT, n, own, environment=answers, seed=seed, **options))
        return await asyncio.gather(*prompts)

    assert asyncio.run(together(0, 1, 2)) == [alone for seed in range(3) for alone in asyncio.run(together(seed))]


def without_counts(tree: TrajectoryTree) -> dict:
    """Return the tree's data without metrics that depend on which branch was first at an environment."""
    about = tree.to_dict()
    return about | {"metrics": {name: x for name, x in tree.metrics.items() if not name.startswith("environment/")}}


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_no_two_samples_after_the_same_tokens_have_the_same_seed(tree, environment):
    """Equal seeds would give equal samples."""
    engine = ParagraphEngine()
    grown(tree, environment, engine=engine)
    samples = [(tuple(request.prompt_ids), request.seed) for request in engine.asked if request.temperature]
    assert len(set(samples)) == len(samples)


# ---- rows ----


@pytest.mark.parametrize("environment", ENVIRONMENTS)
@pytest.mark.parametrize("max_tokens", [1, 2, 7, 20])
@pytest.mark.parametrize("seed", range(2))
def test_rows_are_complete_responses_within_the_limits(tree, environment, max_tokens, seed):
    """A row ends with an end token, at the token limit, at a call beyond the limit, or where no answer has room; or the
    search has dropped it."""
    grown_tree, policy = grown(tree, environment, max_tokens=max_tokens, seed=seed)
    n = config_of(tree, environment).actor_rollout_ref.rollout.n
    assert 1 <= len(grown_tree.leaves) <= n
    if parts("tree")[tree].trajectories is not None:
        assert len(grown_tree.leaves) == n
    for leaf, row in zip(grown_tree.leaves, rows_of(grown_tree, policy), strict=True):
        tokens, mask = row.response_ids, row.response_mask
        fields = {"log_probs": row.response_logprobs, "mask": mask, **row.token_fields}
        assert {name: len(values) for name, values in fields.items()} == dict.fromkeys(fields, len(tokens))
        assert 1 <= len(tokens) <= max_tokens and row.prompt_ids == PROMPT
        calls = sum(grown_tree.segments[i].author != MODEL for i in grown_tree.path(leaf))
        assert calls <= CALL_LIMIT * (environment != "none")
        if not grown_tree.is_dropped(leaf):
            at_limit = len(tokens) == max_tokens
            no_answer = calls == CALL_LIMIT or max_tokens - len(tokens) - 1 < 2
            in_a_call = environment == "tools" and tokens[-1] == CALL and no_answer
            assert mask[-1] == 1 and (tokens[-1] == EOS or at_limit or in_a_call)
            if environment == "game" and tokens[-1] == EOS:
                turns = len(row.extra_fields["turn_scores"])
                assert turns >= calls and row.reward_score == sum(range(1, turns + 1))
    assert all(math.isfinite(value) for value in grown_tree.metrics.values())


@pytest.mark.parametrize("environment", WITH_CONTEXTS)
def test_every_token_is_the_models_with_its_log_probability_or_the_tools(tree, environment):
    """Each row is read again from its prompt on: after a call stands the tool's answer, and nowhere else."""
    engine = ParagraphEngine()
    by_tool = 0
    for row in [row for seed in range(3) for row in rows_of(*grown(tree, environment, engine=engine, seed=seed))]:
        tokens, log_probs, at, turn = row.response_ids, row.response_logprobs, 0, []
        expected, actions, context, start = [], [], PROMPT, 0
        while at < len(tokens):
            p = engine.probabilities([*context, *tokens[start:at]])
            expected.append((1, pytest.approx(math.log(p[tokens[at]]))))
            turn.append(tokens[at])
            at += 1
            if turn[-1] == {"none": None, "tools": CALL}.get(environment, EOS) and at < len(tokens):
                actions.append(tuple(turn))
                answer = (
                    answer_to(turn, 30 - at - 1) if environment == "tools" else list(game_step(actions).observation)
                )
                assert tokens[at : at + len(answer)] == answer
                expected += [(0, 0.0)] * len(answer)
                by_tool, at, turn = by_tool + len(answer), at + len(answer), []
                if environment == "rewritten_game" and (new := rewritten(actions)):
                    context, start = new, at
        assert list(zip(row.response_mask, log_probs, strict=True)) == expected
        ended = [token == EOS and by_model for token, by_model in zip(tokens[:-1], row.response_mask, strict=False)]
        assert sum(ended) == len(actions) * ("game" in environment)
    assert bool(by_tool) == (environment != "none")


@pytest.mark.parametrize("environment", ENVIRONMENTS)
@pytest.mark.parametrize("seed", range(3))
def test_segment_ids_are_numbered_in_the_rows_order_and_shared_only_from_the_first_token_on(tree, environment, seed):
    grown_tree, _ = grown(tree, environment, seed=seed)
    assert grown_tree.renumbered().to_json() == grown_tree.to_json()
    ids, rows, masks = grown_tree.segment_ids(), grown_tree.trajectories(), grown_tree.response_masks()
    in_order = list(dict.fromkeys(segment for row in ids for segment in row))
    assert in_order[0] == 0 and all(list(dict.fromkeys(row)) == sorted(set(row)) for row in ids)
    for i, row in enumerate(ids):
        for j in range(i):
            same = same_beginning(row, ids[j])
            assert not set(row[same:]) & set(ids[j][same:])
            assert rows[i][:same] == rows[j][:same] and masks[i][:same] == masks[j][:same]
    lengths = sum(map(len, rows))
    if "shared_tokens" in grown_tree.metrics:
        stored = sum(len(segment.token_ids) for segment in grown_tree.segments)
        assert grown_tree.metrics["shared_tokens"] == pytest.approx(1 - stored / lengths)


def test_calls_are_counted_once_for_all_rows_that_share_them(tree):
    calls = Calls(CALL_LIMIT)
    grown_tree, _ = grown(tree, "tools", answers=calls, seed=2)
    answered = [segment for segment in grown_tree.segments if segment.author != MODEL]
    assert grown_tree.metrics["tool_calls"] == len(calls.answered) >= len(answered) > 0


# ---- what goes wrong ----


def assert_fails(tree: str, environment: str, engine, tools, message: str) -> None:
    """The error ends the tree, and no task goes on."""

    async def run():
        n, policy = config_of(tree, environment).actor_rollout_ref.rollout.n, policy_of(tree, environment)
        options = {"max_tokens": 40, "stop_token_ids": [EOS], "vocab_size": VOCAB, "environment": tools}
        options["score"] = scoring()
        with pytest.raises(RuntimeError, match=message):
            await grow(engine, PROMPT, n, policy, **options)
        await tools.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())


@pytest.mark.parametrize("environment", ENVIRONMENTS)
@pytest.mark.parametrize("which", [0, 2])
def test_an_engines_failure_ends_the_tree_and_leaves_nothing_running(tree, environment, which):
    class Fails(ParagraphEngine):
        running = 0

        async def generate(self, request):
            if len(self.asked) == which:
                raise RuntimeError("engine core died")
            self.running += 1
            try:
                return await super().generate(request)
            finally:
                self.running -= 1

    engine, delay = Fails(delay=0.01), {} if environment == "none" else {"delay": 0.02}
    assert_fails(tree, environment, engine, environment_of(environment, **delay), "engine core died")
    assert engine.running == 0


def test_an_environments_failure_ends_the_tree_and_leaves_nothing_running(tree):
    class Fails(Calls):
        async def answer(self, state, turn, max_tokens):
            await asyncio.sleep(0.01)
            raise RuntimeError("no such node")

    assert_fails(tree, "tools", ParagraphEngine(delay=0.01), Fails(CALL_LIMIT), "no such node")


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_a_tree_that_reads_rewards_grows_whether_all_or_none_succeed(tree, environment):
    if not parts("tree")[tree].reads_rewards:
        return
    for reward in (-0.5, 0.0, 1.0):
        scored: list[list[int]] = []

        def reward_of(tokens, reward=reward, scored=scored):
            scored.append(list(tokens))
            return reward

        grown_tree, _ = grown(tree, environment, reward_of=reward_of)
        assert len(grown_tree.leaves) == config_of(tree, environment).actor_rollout_ref.rollout.n
        if environment == "game":  # the game gives the rewards itself
            assert not scored
        else:
            assert scored and all(tokens in grown_tree.trajectories() for tokens in scored)


# ---- keys ----


def leaves_of(values: dict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and value and all(isinstance(name, str) for name in value):
            yield from leaves_of(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def check(config: DictConfig) -> None:
    check_typed_sections(config)
    check_parts(config)


def changed(tree: str, **values: Any) -> DictConfig:
    config = copied(config_of(tree))
    for key, value in values.items():
        OmegaConf.update(config, key, value, merge=False, force_add=True)
    return config


def test_an_unknown_key_is_refused_by_its_full_name(tree):
    if section := parts("tree")[tree].section:
        with pytest.raises(ValueError, match=f"{section} has no key no_such_key; known: "):
            check(changed(tree, **{f"{section}.no_such_key": 1}))


def test_a_key_of_a_wrong_type_is_refused_by_its_full_name(tree):
    part = parts("tree")[tree]
    for key, value in leaves_of(asdict(part.keys()) if part.keys else {}):
        wrong = [1, [2]] if isinstance(value, dict | str) else {"a": {}}
        with pytest.raises(ValueError, match=f"{part.section}.{key}"):
            check(changed(tree, **{f"{part.section}.{key}": wrong}))


def test_a_number_of_trajectories_that_the_tree_does_not_grow_is_refused(tree):
    part = parts("tree")[tree]
    if part.trajectories is not None:
        n = config_of(tree).actor_rollout_ref.rollout.n + 1
        with pytest.raises(ValueError, match=rf"{ROLLOUT}\.n={n}: tree={tree} grows .* = \d+ trajectories"):
            check(changed(tree, **{f"{ROLLOUT}.n": n}))


def test_a_server_that_reports_too_few_tokens_is_refused(tree):
    """An engine for trees that read entropies or top log-probabilities."""
    part = parts("tree")[tree]
    keys = asdict(part.keys()) if part.keys else {}
    for key in keys.keys() & {"entropy_top_k", "max_n_branch_per_token"}:
        with pytest.raises(ValueError, match=f"{part.section}.{key}=21: vLLM reports at most 20"):
            check(changed(tree, **{f"{part.section}.{key}": 21}))
        with pytest.raises(ValueError, match=f"{ROLLOUT}.logprobs_mode=raw_logits"):
            check(changed(tree, **{f"{ROLLOUT}.logprobs_mode": "raw_logits"}))


__all__ = [name for name in dir() if name.startswith("test_")]
