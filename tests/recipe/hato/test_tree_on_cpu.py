"""Trees grown on a real, tiny model: bounds, seeds, and log-probs that are the model's own."""

import asyncio
import math
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from recipe.hato.keys import ANSWER_LIKELIHOOD, ExplorationConfig, HATOConfig, TreeConfig, UncertaintyConfig
from recipe.hato.local_reward import heuristic
from recipe.hato.search import NodeBudget
from recipe.hato.tree import Policy
from recipe.hato.value_model import FEATURES, SearchState, value_model_of
from tests.workers.rollout.toy_engine import EOS, VOCAB, Calls, HashEngine, Letters
from verl.workers.rollout import tree_builder as builder
from verl.workers.rollout.answer_likelihood import AnswerLikelihood
from verl.workers.rollout.engines.local_transformers import TransformersEngine
from verl.workers.rollout.environment import NO_ENVIRONMENT
from verl.workers.rollout.prompt_task import PromptSettings, PromptTask
from verl.workers.rollout.trajectory_tree import TOOL
from verl.workers.rollout.tree_builder import Sampling

PROMPT = [1, 2, 3]


class Slow(TransformersEngine):
    """Answers in an order of its own, and remembers what it was asked for."""

    def __init__(self, model, order: int):
        super().__init__(model, Letters())
        self.clock, self.asked = random.Random(order), []

    async def generate(self, request):
        self.asked.append(request)
        await asyncio.sleep(self.clock.random() / 1000)
        return await super().generate(request)


@pytest.fixture(scope="module")
def model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    config = Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=2, initializer_range=0.4)
    return Qwen2ForCausalLM(config).eval()


def config_of(**tree) -> HATOConfig:
    shape = {"max_depth": 4, "max_step_tokens": 5, "step_delimiter": "c", "max_nodes": 40} | tree
    return HATOConfig(tree=TreeConfig(**shape), uncertainty=UncertaintyConfig(entropy_top_k=VOCAB))


def grow(engine, config: HATOConfig, *, seed=0, temperature=1.0, local_reward=heuristic, settings=(), **more):
    task = PromptTask({}, settings=PromptSettings(tree=settings))
    policy = Policy(config, value_model_of(config, 0), local_reward, Letters().decode).for_task(task, None)
    options = {"max_tokens": 24, "stop_token_ids": [EOS], "vocab_size": VOCAB, "request_id": "a"}
    tree = builder.grow(engine, PROMPT, 8, policy, sampling=Sampling(temperature), seed=seed, **options, **more)
    return asyncio.run(tree)


def test_a_step_after_which_the_answer_does_not_fit_into_the_context_has_no_local_reward(model):
    async def score(before, answer):
        return [-0.5 for _ in answer]

    context = 14
    likelihood = AnswerLikelihood(
        score, SimpleNamespace(encode=lambda text, **_: [7] * len(text)), "b", ("c",), context
    )
    config = replace(config_of(), local_reward=ANSWER_LIKELIHOOD)
    tree = grow(Slow(model, 0), config, answer_likelihood=likelihood)
    rewards = set()
    for leaf in tree.leaves:
        n_tokens = len(PROMPT)
        for i in tree.path(leaf):
            n_tokens += len(tree.segments[i].token_ids)
            local = tree.segments[i].info.fields["local_rewards"]
            assert local == pytest.approx(0.0 if n_tokens + 3 > context else math.exp(-0.5))
            rewards.add(local)
    assert len(rewards) == 2 and likelihood.left_out


def depth(tree, i: int) -> int:
    return len(tree.path(i))


@pytest.mark.parametrize("algorithm", ["bfs", "dfs", "beam"])
@pytest.mark.parametrize("seed", range(6))
def test_bounds_of_a_tree(model, algorithm, seed):
    engine = Slow(model, 0)
    tree = grow(engine, config_of(search_algorithm=algorithm, max_nodes_per_level=6), seed=seed)
    kept = {i for leaf in tree.leaves for i in tree.path(leaf)}
    assert 1 <= len(tree.leaves) == len(set(tree.leaves)) <= 8
    assert len(kept) == tree.metrics["nodes_kept"] <= 40 and len(tree.segments) == tree.metrics["nodes_made"]
    for i, segment in enumerate(tree.segments):
        features, notes = segment.info.record.features, segment.info.notes
        assert len(features) == len(FEATURES) and all(0 <= value <= 1 for value in features)
        assert 1 <= depth(tree, i) <= 4 and 0 <= notes["value"] <= 1 and notes["uncertainty"] > 0
        assert bool(segment.token_ids) == (i in kept)
    for leaf, path in zip(tree.leaves, tree.trajectories(), strict=True):
        assert len(path) <= 24 and (path[-1] == EOS or len(path) == 24)
        for i in tree.path(leaf)[:-1]:  # to the delimiter or the bound of a step
            text = Letters().decode(tree.segments[i].token_ids)
            assert "c" not in text[:-1] and (text[-1] == "c" or len(text) == 5)
    levels = [depth(tree, i) for i in kept]
    assert max(levels.count(level) for level in set(levels)) <= 6
    assert {request.request_id for request in engine.asked} == {"a"}


def test_the_way_to_the_end_has_neither_delimiter_nor_bound_of_a_step(model):
    engine = Slow(model, 0)
    tree = grow(engine, config_of(max_depth=1, step_delimiter="a"))
    assert all(request.stop == [] and request.max_tokens == 24 for request in engine.asked)
    assert all(segment.parent is None for segment in tree.segments)


def test_a_shared_budget_and_entropies_that_are_not_asked_for(model):
    config, engine = replace(config_of(), uncertainty=UncertaintyConfig(entropy_top_k=0)), Slow(model, 0)
    tree = grow(engine, config, settings=(NodeBudget(3), SearchState(-1, 0.6, b"")))
    assert {request.temperature for request in engine.asked} == {0.6}, "the trainer's goes before the prompt's"
    assert tree.metrics["nodes_kept"] <= 3
    assert all(request.n_entropy == 0 for request in engine.asked)
    assert {segment.info.notes["entropy"] for segment in tree.segments} == {0.0}


def test_greedy_siblings_are_one_step_and_get_one_local_reward(model):
    seen = []

    async def local(step):
        await asyncio.sleep(0)
        seen.append((tuple(step.before), tuple(step.tokens)))
        assert step.decode(step.tokens).islower() and list(step.problem) == PROMPT
        return 0.25

    exploration = ExplorationConfig(initial_temperature=1e-4)
    config = replace(config_of(branching_factor=3, spread_leaves=False), exploration=exploration)
    tree = grow(Slow(model, 0), config, temperature=1e-4, local_reward=local)
    assert len(tree.leaves) == 1 and tree.segments[0].info.fields["draws"] == 3
    assert {segment.info.fields["local_rewards"] for segment in tree.segments} == {0.25}
    assert len(seen) == len(tree.segments)


@pytest.mark.parametrize("column", [0, 1])
def test_a_value_model_that_is_not_finite_is_named(model, monkeypatch, column):
    def predict(self, features):
        columns = [torch.full((len(features),), 0.5) for _ in range(2)]
        columns[column][-1] = float("nan")
        return tuple(columns)

    monkeypatch.setattr("recipe.hato.value_model.ValueModel.predict", predict)
    with pytest.raises(ValueError, match="HATO's value model gives estimates that are not finite"):
        grow(Slow(model, 0), config_of())


# -- what the search drops --

DROPPING = ExplorationConfig(beta_u=0.0, pruning_threshold=0.5, selection_temperature=0.25)


def dropping(**tree) -> HATOConfig:
    shape = {"max_depth": 4, "max_step_tokens": 4, "step_delimiter": "c", "max_nodes": 60} | tree
    return replace(config_of(), tree=TreeConfig(**shape), exploration=DROPPING)


class Taste:
    """Values in the place of a model's: a number drawn with a step's features."""

    def predict(self, features):
        values = [random.Random(str([round(x, 4) for x in row])).random() for row in features]
        return torch.tensor(values), torch.zeros(len(values))


def searched(config: HATOConfig, seed: int, n: int = 8, environment=NO_ENVIRONMENT, order: int = 0):
    """The policy, its tree, and the engine, in which every prefix has a distribution of its own."""
    policy, engine = Policy(config, Taste(), heuristic, Letters().decode), HashEngine(3.0, delay=0.002, order=order)
    options = {"max_tokens": 30, "stop_token_ids": [EOS], "vocab_size": VOCAB, "seed": seed}
    return policy, asyncio.run(builder.grow(engine, PROMPT, n, policy, environment=environment, **options)), engine


def split(tree) -> tuple[list[int], list[int]]:
    """Leaves with an answer and without."""
    return [x for x in tree.leaves if not tree.is_dropped(x)], [x for x in tree.leaves if tree.is_dropped(x)]


@pytest.mark.parametrize("tools", [False, True])
@pytest.mark.parametrize("algorithm", ["bfs", "dfs", "beam"])
@pytest.mark.parametrize("seed", range(4))
def test_dropped_steps_are_rows_after_the_answers_and_change_nothing_else(algorithm, seed, tools):
    shape = {"search_algorithm": algorithm, "max_nodes_per_level": 4}
    environment = (lambda: Calls()) if tools else (lambda: NO_ENVIRONMENT)
    before, after = (searched(dropping(**shape, train_dropped=on), seed, 12, environment()) for on in (False, True))
    # what tools and the engine take decides who asks first
    assert sorted(r.seed for r in before[2].asked) == sorted(r.seed for r in after[2].asked), "the same search"
    tree, (answers, dropped) = after[1], split(after[1])
    assert tree.leaves == [*answers, *dropped] and len(tree.leaves) <= 12
    paths = tree.trajectories()
    assert paths[: len(answers)] == before[1].trajectories()
    assert not any("dropped" in segment.info.fields for segment in before[1].segments)
    assert {"dropped_steps", "dropped_rows"} == tree.metrics.keys() - before[1].metrics.keys()
    assert before[1].metrics.items() <= tree.metrics.items()
    assert len(dropped) == tree.metrics["dropped_rows"] == min(12 - len(answers), tree.metrics["dropped_steps"])
    # the value model learns from the same steps
    own, learnt = (policy.data_for_trainer(grown) for policy, grown, _ in (before, after))
    assert own.features == learnt.features and own.values == learnt.values
    assert set(learnt.segments) <= {i for leaf in answers for i in tree.path(leaf)}
    # a step that was dropped was open, its value was low, or a beam had better ones
    for leaf, path in zip(dropped, paths[len(answers) :], strict=True):
        last = tree.segments[leaf]
        assert path[-1] != EOS and len(path) < 30 or last.author == TOOL
        step = last if "value" in last.info.notes else tree.segments[last.parent]
        assert step.info.fields["dropped"] == 1 and (step.info.notes["value"] < 0.5 or algorithm == "beam")
        assert not any(segment.parent == leaf for segment in tree.segments), "nothing follows it"
    # only rows hold tokens
    on_rows = {i for leaf in tree.leaves for i in tree.path(leaf)}
    assert on_rows == {i for i, segment in enumerate(tree.segments) if segment.token_ids}


@pytest.mark.parametrize("algorithm", ["bfs", "dfs"])
def test_stopping_early_without_a_tree(algorithm):
    """n paths that do not share a segment: the answers, and what was given up after a step; together n rows."""
    config = dropping(independent_paths=True, train_dropped=True, search_algorithm=algorithm)
    given_up = 0
    for seed in range(5):
        _, tree, engine = searched(config, seed, 10)
        answers, dropped = split(tree)
        assert len(answers) + len(dropped) == 10 and answers and len(set(tree.leaves)) == 10
        paths = [tree.path(leaf) for leaf in tree.leaves]
        assert len({i for path in paths for i in path}) == sum(map(len, paths)) == len(tree.segments)
        assert len(engine.asked) >= sum(map(len, paths)), "nothing else was asked for"
        for leaf, path in zip(tree.leaves, paths, strict=True):
            *above, last = (tree.segments[i].info.notes["value"] for i in path)
            assert all(value >= 0.5 for value in above) or leaf in answers and len(answers) == 1, "the last way stays"
            assert leaf in answers or last < 0.5
        given_up += len(dropped)
    assert given_up > 10
