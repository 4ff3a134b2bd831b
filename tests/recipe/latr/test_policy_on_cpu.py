"""LATR's policy on the project's tiny model, and its pure parts: schedules, similarities, config."""

import asyncio
import random
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from transformers import GenerationConfig

from recipe.common.tiny_model import TinyModelConfig, make_model, make_tokenizer
from recipe.latr.component import ThresholdScheduler
from recipe.latr.keys import SECTION, KTConfig, mix_ratio, next_tightened_steps, tightened
from recipe.latr.lookahead import edit_distance_ratio, rouge_l, suffix_match
from recipe.latr.tree import Policy
from tests.configs import composed
from tests.tables import table
from verl.workers.config.keys import read_keys
from verl.workers.rollout.engines.interface import end_of_sequence_ids
from verl.workers.rollout.engines.local_transformers import TransformersEngine
from verl.workers.rollout.tree_builder import grow, token_text

PROMPTS = ["1 2 3 = 6", "4 4 = 8"]
BRANCHY = {"prob_filter_abs_thres": 0.0, "prob_filter_rel_thres": 1.0, "rollout_filter_steps": [3]}


@pytest.fixture(scope="module")
def model_and_tokenizer():
    tokenizer = make_tokenizer()
    return make_model(TinyModelConfig(seed=1, hidden_size=24, intermediate_size=48, num_layers=1), tokenizer), tokenizer


def generate(model_and_tokenizer, config, **options):
    model, tokenizer = model_and_tokenizer
    policy, engine, n = Policy(config, token_text(tokenizer)), TransformersEngine(model), options.pop("n", 8)
    options |= {"max_tokens": 12, "stop_token_ids": [tokenizer.eos_token_id]}
    return [asyncio.run(grow(engine, tokenizer(text).input_ids, n, policy, **options)) for text in PROMPTS]


def test_the_mix_ratio_splits_tree_and_ordinary_samples(model_and_tokenizer):
    config = KTConfig(**BRANCHY, mix_ratio_schedule={0: 0.5}, return_on_full=False, force_return_step=-1)
    tree = generate(model_and_tokenizer, config)[0]
    assert tree.metrics["tree_share"] == 0.5 and len(tree.trajectories()) == 8
    greedy_only = generate(model_and_tokenizer, config, seed=5)[0].trajectories()
    assert tree.trajectories()[:4] == greedy_only[:4]  # the tree is greedy: no seed
    assert tree.trajectories()[4:] != greedy_only[4:]
    plain = generate(model_and_tokenizer, KTConfig(mix_ratio_schedule={0: 0.0}))[0]
    assert len(plain.trajectories()) == 8 and plain.metrics == {"tree_share": 0.0}


def test_the_segments_say_what_happened_there(model_and_tokenizer):
    config = KTConfig(**BRANCHY, random_pruning_ratio=0.7, keep_math_symbols=False)
    trees = generate(model_and_tokenizer, config, n=4)
    notes = [segment.info.notes for tree in trees for segment in tree.segments]
    assert any("pruned" in each for each in notes)
    for tree in trees:
        returned = {i for leaf in tree.leaves for i in tree.path(leaf)}
        for i, segment in enumerate(tree.segments):
            assert segment.info.shown() in ({}, {"pruned": "random"}, {"pruned": "parent dropped"})
            assert not (i in returned and "pruned" in segment.info.notes)


@pytest.mark.parametrize("fill", [True, False])
def test_branches_that_never_opened(model_and_tokenizer, fill):
    """No candidate passes: one branch; filling repeats it."""
    config = KTConfig(prob_filter_abs_thres=1.0, fill_return_sequences=fill, force_return_step=-1, return_on_full=False)
    responses = generate(model_and_tokenizer, config)[0].trajectories()
    assert len(responses) == (8 if fill else 1)
    assert len({tuple(tokens) for tokens in responses}) == 1


# ---- similarities, by hand ----


def test_similarities_by_hand():
    a, b = [1, 2, 3, 4], [1, 3, 4, 5]
    assert edit_distance_ratio(a, b) == 2 / 4  # drop 2, add 5
    assert rouge_l(a, b) == 3 / 4  # 1 3 4
    assert suffix_match(a, b) == 2 / 4  # "3 4" ends a and is inside b
    assert suffix_match([1, 2], [3, 4]) == 0.0
    assert suffix_match([0xD800, 151_643, 10, 0xDFFF], [0xD800, 151_643, 10, 0xDFFF]) == 1.0, "any token id"
    assert (edit_distance_ratio(a, a), rouge_l(a, a), suffix_match(a, a)) == (0.0, 1.0, 1.0)


# ---- schedules ----


def test_mix_ratio_depends_on_the_step_alone():
    schedule = {0: 1.0, 10: 0.75, 20: 0.5, 80: 0.25, 200: 0.0}
    steps = {0: 1.0, 9: 1.0, 10: 0.75, 19: 0.75, 20: 0.5, 79: 0.5, 80: 0.25, 199: 0.25, 200: 0.0, 999: 0.0}
    assert {step: mix_ratio(schedule, step) for step in steps} == steps
    policies = [Policy(KTConfig(mix_ratio_schedule=schedule), training_step=step) for step in (0, 10, 20, 80, 200)]
    assert [policy.branches(8) for policy in policies] == [8, 6, 4, 2, 0]


def test_the_parameter_scheduler_tightens_loosens_and_stops_at_its_bounds():
    config = KTConfig(max_n_step=2, rollout_filter_rouge_l_thres=0.5)
    tightened_steps = 0
    for expected in (1, 2, 2):
        tightened_steps = next_tightened_steps(config, tightened_steps, suppress_ratio=0.2, empty_branch_ratio=0.0)
        assert tightened_steps == expected
    tight = tightened(config, tightened_steps)
    assert tight.prob_filter_abs_thres == pytest.approx(0.27) and tight.prob_filter_rel_thres == pytest.approx(0.13)
    assert tight.rollout_filter_edit_dist_thres == pytest.approx(0.42)
    assert tight.rollout_filter_rouge_l_thres == pytest.approx(0.48)
    for _ in range(9):
        tightened_steps = next_tightened_steps(config, tightened_steps, suppress_ratio=0.0, empty_branch_ratio=0.2)
    assert tightened_steps == -2
    ThresholdScheduler(composed("explore", "tree=latr")).after_advantage(None, {})  # off by default: it reads no rows


@pytest.mark.parametrize("seed", range(10))
def test_tightening_never_leaves_the_unit_interval(seed):
    generator = random.Random(seed)
    config = KTConfig(prob_filter_abs_thres=generator.random(), prob_filter_rel_thres=generator.random())
    for tightened_steps in (-1000, 1000):
        tight = tightened(config, tightened_steps)
        assert 0 <= tight.prob_filter_abs_thres <= 1 and 0 <= tight.prob_filter_rel_thres <= 1


@pytest.mark.parametrize(("key", "value", "message"), table(__file__, "bad values"))
def test_bad_values_name_their_key(key, value, message):
    with pytest.raises(ValueError) as error:
        read_keys(KTConfig, {key: value}, SECTION)
    assert str(error.value) == f"{SECTION}.{message}"


@pytest.mark.parametrize(("ids", "expected"), [(None, [7]), (7, [7]), ([7, 3], [3, 7]), (9, [7, 9])])
def test_the_generation_configs_ends_count_too(tmp_path, ids, expected):
    assert end_of_sequence_ids(SimpleNamespace(eos_token_id=7), str(tmp_path)) == [7]
    GenerationConfig(eos_token_id=ids).save_pretrained(tmp_path)
    assert end_of_sequence_ids(SimpleNamespace(eos_token_id=7), str(tmp_path)) == expected


@pytest.mark.parametrize("sampling", [{"temperature": 0.6}, {"top_p": 0.9}, {"top_k": 20}])
def test_sampling_in_the_tree_is_refused_where_candidates_would_not_be_raw(sampling):
    def policy_of(sample_nk, **rollout):
        rollout = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "kt": {"sample_nk": sample_nk}} | rollout
        return Policy.from_config(OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}}))

    assert policy_of("none", **sampling).config.sample_nk == "none"
    assert policy_of("full").config.sample_nk == "full"
    with pytest.raises(ValueError, match="sample_nk=full needs temperature=1"):
        policy_of("full", **sampling)
