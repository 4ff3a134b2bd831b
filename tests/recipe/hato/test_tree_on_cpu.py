"""Trees grown on a real, tiny model: bounds, seeds, and log-probs that are the model's own."""

import asyncio
import random
from dataclasses import replace

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from recipe.hato.keys import ExplorationConfig, HATOConfig, TreeConfig, UncertaintyConfig
from recipe.hato.local_reward import heuristic
from recipe.hato.search import NodeBudget
from recipe.hato.tree import Policy
from recipe.hato.value_model import FEATURES, SearchState, pack, value_model_of
from tests.workers.rollout.toy_engine import EOS, VOCAB, Calls, HashEngine, Letters
from verl.workers.rollout import tree_builder as builder
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
    policy = Policy(config, value_model_of(config, 0), local_reward, Letters().decode).for_task(task)
    options = {"max_tokens": 24, "stop_token_ids": [EOS], "vocab_size": VOCAB, "request_id": "a"}
    tree = builder.grow(engine, PROMPT, 8, policy, sampling=Sampling(temperature), seed=seed, **options, **more)
    return asyncio.run(tree)


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
        assert 1 <= len(tree.path(i)) <= 4 and 0 <= notes["value"] <= 1 and notes["uncertainty"] > 0
        assert bool(segment.token_ids) == (i in kept)
    for leaf, path in zip(tree.leaves, tree.trajectories(), strict=True):
        assert len(path) <= 24 and (path[-1] == EOS or len(path) == 24)
        for i in tree.path(leaf)[:-1]:  # to the delimiter or the bound of a step
            text = Letters().decode(tree.segments[i].token_ids)
            assert "c" not in text[:-1] and (text[-1] == "c" or len(text) == 5)
    levels = [len(tree.path(i)) for i in kept]
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


def test_a_late_prompts_value_model_is_not_loaded_over_a_newer_one():
    policy, taught = Policy(config_of(), value_model_of(config_of(), 0), heuristic), value_model_of(config_of(), 1)
    probe = [[0.5] * len(FEATURES)]
    taught.observe(probe * 64, [1.0] * 64)
    for learnt, model in ((2, taught), (1, value_model_of(config_of(), 1))):
        state = SearchState(learnt, 0.9, pack(model.state_dict()))
        policy.for_task(PromptTask({}, settings=PromptSettings(tree=(state,))))
        assert policy.value_model.predict(probe)[0] == taught.predict(probe)[0]


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
    # the order of requests depends on how long tools and the engine take
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
    own, learnt = (policy.data_for_trainer(grown).estimates for policy, grown, _ in (before, after))
    assert [*own.values()] == [*learnt.values()]
    assert learnt.keys() <= {i for leaf in answers for i in tree.path(leaf)}
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
