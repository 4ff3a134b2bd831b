"""Trees grown on a real, tiny model: bounds, seeds, and log-probs that are the model's own."""

import asyncio
import math
import random
from dataclasses import replace

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.workers.rollout.test_entropy_on_cpu import slow
from verl.workers.rollout.rollout_engine import TransformersEngine
from verl.workers.rollout.trees.hato.config import ExplorationConfig, HATOConfig, TreeConfig, UncertaintyConfig
from verl.workers.rollout.trees.hato.growth import TreeGrowth
from verl.workers.rollout.trees.hato.rewards import heuristic
from verl.workers.rollout.trees.hato.step_features import FEATURES
from verl.workers.rollout.trees.hato.tree import LEAF, ROOT
from verl.workers.rollout.trees.hato.value_model import value_model_of

VOCAB, EOS, PROMPT = 20, 19, [1, 2, 3]


class Letters:
    """A tokenizer of the letters a to t; t ends a response."""

    def __len__(self):
        return VOCAB

    def decode(self, tokens):
        return "".join(chr(ord("a") + token) for token in tokens)


class Slow(TransformersEngine):
    """Answers in an order of its own, and remembers what it was asked for."""

    def __init__(self, model, order: int):
        super().__init__(model, Letters())
        self.clock, self.asked = random.Random(order), []

    async def generate(self, prompt_ids, **options):
        self.asked.append((list(prompt_ids), options))
        await asyncio.sleep(self.clock.random() / 1000)
        return await super().generate(prompt_ids, **options)


class FromCandidates(Slow):
    """Reports what the engine's entropies are estimated from, and estimates them a token at a time."""

    async def generate(self, prompt_ids, *, n_entropy, **options):
        generation = await super().generate(prompt_ids, n_candidates=n_entropy, **options)
        generation.entropies = [slow([p for _, p in step], VOCAB) for step in generation.candidates]
        return generation


@pytest.fixture(scope="module")
def model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    config = Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=2, initializer_range=0.4)
    return Qwen2ForCausalLM(config).eval()


def config_of(**tree) -> HATOConfig:
    shape = {"max_depth": 4, "max_step_tokens": 5, "step_delimiter": "c", "max_nodes": 40} | tree
    return HATOConfig(tree=TreeConfig(**shape), uncertainty=UncertaintyConfig(entropy_top_k=VOCAB))


def grow(model, config: HATOConfig, *, n=8, room=24, seed=0, order=0, temperature=1.0, engine=Slow, **options):
    engine = engine(model, order)
    settings = {"room": room, "stop_token_ids": [EOS], "vocab_size": VOCAB, "local_reward": heuristic} | options
    settings |= {"value_model": value_model_of(config, 0), "seed": seed, "temperature": temperature}
    growth = TreeGrowth(engine, PROMPT, n, config, request_id="a", tokenizer=Letters(), **settings)
    return asyncio.run(growth.run()), engine


@pytest.mark.parametrize("algorithm", ["bfs", "dfs", "beam"])
@pytest.mark.parametrize("seed", range(6))
def test_bounds_of_a_tree(model, algorithm, seed):
    config = config_of(search_algorithm=algorithm, max_nodes_per_level=6)
    growth, engine = grow(model, config, seed=seed)
    tree, features = growth.tree, growth.features
    assert len(features) == len(tree.nodes) and tree.n_kept <= 40
    leaves = tree.leaves()
    assert 1 <= len(leaves) <= 8 and not tree.open_nodes()
    for number, node in enumerate(tree.nodes):
        if number == ROOT:
            continue
        assert len(features[number]) == len(FEATURES) and all(0 <= value <= 1 for value in features[number])
        assert 1 <= node.depth <= 4 and 0 <= node.value <= 1 and node.uncertainty > 0
        if not tree.is_kept(number):
            continue
        text = Letters().decode(node.token_ids)
        if node.status != LEAF:  # a step: to the delimiter or its bound
            assert "c" not in text[:-1] and (text[-1] == "c" or len(text) == 5)
        path = [token for step in tree.path(number) for token in tree.nodes[step].token_ids]
        assert len(path) <= 24
        if node.status == LEAF:
            assert path[-1] == EOS or len(path) == 24
    assert {options["request_id"] for _, options in engine.asked} == {"a"}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_and_entropies_are_the_models(model, temperature):
    growth, _ = grow(model, config_of(), temperature=temperature)
    for leaf in growth.tree.leaves():
        steps = [growth.tree.nodes[step] for step in growth.tree.path(leaf)]
        tokens = [token for step in steps for token in step.token_ids]
        with torch.no_grad():
            logits = model(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1]
        expected = (logits / temperature).log_softmax(-1)[range(len(tokens)), tokens]
        assert [p for step in steps for p in step.log_probs] == pytest.approx(expected.tolist(), abs=1e-4)
        entropies = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1) / math.log(VOCAB)
        at = 0
        for step in steps:
            own = entropies[at : at + len(step.token_ids)].mean().item()
            assert step.entropy == pytest.approx(own, abs=1e-4)
            at += len(step.token_ids)


def test_a_tree_follows_from_its_seed_however_requests_are_answered_in_time(model):
    texts = [grow(model, config_of(), seed=5, order=order)[0].tree.to_trajectory_tree().to_json() for order in range(4)]
    assert len(set(texts)) == 1
    assert grow(model, config_of(), seed=6)[0].tree.to_trajectory_tree().to_json() != texts[0]


@pytest.mark.parametrize("seed", range(3))
def test_the_tree_is_the_same_from_entropies_as_from_candidates(model, seed):
    config = replace(config_of(), uncertainty=UncertaintyConfig(entropy_top_k=5))
    ours, theirs = (grow(model, config, seed=seed, engine=engine)[0] for engine in (Slow, FromCandidates))
    assert ours.tree.to_trajectory_tree().trajectories() == theirs.tree.to_trajectory_tree().trajectories()
    for row, expected in zip(ours.features, theirs.features, strict=True):
        assert row == pytest.approx(expected, abs=1e-6)
    assert len({row[FEATURES.index("mean_entropy")] for row in ours.features}) > 5


def test_the_way_to_the_end_has_neither_delimiter_nor_bound_of_a_step(model):
    growth, engine = grow(model, config_of(max_depth=1, step_delimiter="a"))
    assert all(options["stop"] == () and options["max_tokens"] == 24 for _, options in engine.asked)
    assert all(node.depth == 1 for node in growth.tree.nodes[1:])


def test_a_shared_budget_and_entropies_that_are_not_asked_for(model):
    config = replace(config_of(), uncertainty=UncertaintyConfig(entropy_top_k=0))
    growth, engine = grow(model, config, max_nodes=3)
    assert growth.tree.n_kept <= 3
    assert all(options["n_entropy"] == 0 for _, options in engine.asked)
    assert {row[FEATURES.index("mean_entropy")] for row in growth.features} == {0.0}


def test_greedy_siblings_are_one_node_and_get_one_local_reward(model):
    seen = []

    async def local(step):
        await asyncio.sleep(0)
        seen.append((tuple(step.before), tuple(step.tokens)))
        assert step.decode(step.tokens).islower() and list(step.problem) == PROMPT
        return 0.25

    exploration = ExplorationConfig(initial_temperature=1e-4)
    config = replace(config_of(branching_factor=3, spread_leaves=False), exploration=exploration)
    growth, _ = grow(model, config, temperature=1e-4, local_reward=local)
    assert len(growth.tree.leaves()) == 1 and growth.tree.nodes[1].count == 3
    assert {node.local_reward for node in growth.tree.nodes[1:]} == {0.25} and len(seen) == len(growth.tree.nodes) - 1


def test_an_engine_that_fails_fails_the_tree_and_leaves_nothing_running(model):
    class Fails(Slow):
        running = 0

        async def generate(self, prompt_ids, **options):
            if len(self.asked) == 4:
                raise RuntimeError("out of memory")
            Fails.running += 1
            try:
                return await super().generate(prompt_ids, **options)
            finally:
                Fails.running -= 1

    config = config_of()
    growth = TreeGrowth(
        Fails(model, 0),
        PROMPT,
        8,
        config,
        room=24,
        stop_token_ids=[EOS],
        vocab_size=VOCAB,
        local_reward=heuristic,
        value_model=value_model_of(config, 0),
    )
    with pytest.raises(RuntimeError, match="out of memory"):
        asyncio.run(growth.run())
    assert Fails.running == 0
