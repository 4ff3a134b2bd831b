"""Every tree with every environment, sampler, credit and loss takes a step of a real tiny model, or is refused.

tests/e2e/test_combinations_on_cpu.py runs some of them on the real stack.
"""

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from tests import composition
from tests.composition import CREDITS, ENVIRONMENTS, LOSSES, PAGE, SAMPLERS, TREES, Cell, cells
from tests.configs import composed
from verl.utils.parts import parts

UNSHARED = ("plain", "over_generation")


@pytest.mark.slow
def test_every_two_parts_that_go_together_take_a_step():
    """In few combinations, each of which has as many pairs as possible that no other one had."""
    chosen = composition.covering_cells()
    for cell in chosen:
        composition.take_step(cell)
    allowed = {pair for cell in cells() if composition.refusal(cell) is None for pair in composition.pairs(cell)}
    assert {pair for cell in chosen for pair in composition.pairs(cell)} == allowed
    assert len(chosen) < len(set(cells())) / 5


def test_the_page_is_up_to_date():
    """Which combinations are refused, and why: a new refusal is seen here."""
    assert PAGE.read_text().partition(composition.MARK)[2] == composition.table(), "run python tests/composition.py"


def test_the_matrix_holds_every_part():
    registered = (
        {name for name, part in parts(kind).items() if not part.alias} for kind in ("tree", "sampler", "credit", "loss")
    )
    assert [set(TREES), set(SAMPLERS), set(CREDITS), set(LOSSES)] == list(registered)
    assert {*ENVIRONMENTS} == {"none", "tools"}
    sizes = (len(part) for part in (TREES, ENVIRONMENTS, SAMPLERS, CREDITS, LOSSES))
    assert len(set(cells())) == np.prod(list(sizes))


def test_a_combinations_config_is_hydras():
    cell = Cell("arpo", "tools", "tempered", "hato", "aepo")
    made = OmegaConf.to_container(composition.config_of(cell), resolve=True)
    choices = (f"{part}={choice}" for part, choice in cell._asdict().items())
    expected = OmegaConf.to_container(composed("explore", "hardware=cpu", *choices))
    keys = ["actor_rollout_ref.actor.policy_loss.loss_mode", "actor_rollout_ref.actor.enable_entropy_balanced_clipping"]
    keys += ["actor_rollout_ref.actor.loss_agg_mode", "actor_rollout_ref.actor.clip_ratio_high"]
    keys += ["actor_rollout_ref.rollout.adaptive_temperature", "actor_rollout_ref.rollout.engine_kwargs.vllm"]
    keys += ["actor_rollout_ref.rollout.tree", "actor_rollout_ref.rollout.environment", "algorithm.adv_estimator"]
    keys += ["hato.reward_weights", "actor_rollout_ref.actor.adaptive_clip"]
    for key in keys:
        assert OmegaConf.select(OmegaConf.create(made), key) == OmegaConf.select(OmegaConf.create(expected), key), key


@pytest.mark.parametrize("environment", ENVIRONMENTS)
@pytest.mark.parametrize("tree", TREES)
def test_rows_are_what_the_model_and_the_tool_have_written(tree, environment):
    """Log-probabilities are the model's, tools' tokens among those before; ids say what is shared, and it is."""
    rollout = composition.rollout_of(tree, environment, "plain")
    n = composition.composed(tree, environment).actor_rollout_ref.rollout.n
    assert all(1 < count <= n for count in np.unique(rollout.index, return_counts=True)[1])
    reported = torch.nn.utils.rnn.pad_sequence([torch.tensor(row.response_logprobs) for row in rollout.rows], True)
    assert ((reported - rollout.old) * rollout.mask).abs().max() < 1e-4
    by_tool = sum(0 in row.response_mask for row in rollout.rows)
    assert by_tool > len(rollout.rows) / 3 if environment == "tools" else by_tool == 0
    shared = 0
    for i, a in enumerate(rollout.rows):
        assert len(a.response_ids) <= 24 and a.response_mask[-1] == 1
        for j in range(i):
            b, same = rollout.rows[j], 0
            ids = [row.token_fields["segment_ids"] for row in (a, b)]
            if rollout.index[i] == rollout.index[j]:
                same = next((k for k, (x, y) in enumerate(zip(*ids, strict=False)) if x != y), min(map(len, ids)))
            assert a.response_ids[:same] == b.response_ids[:same] and a.response_mask[:same] == b.response_mask[:same]
            assert rollout.index[i] != rollout.index[j] or not set(ids[0][same:]) & set(ids[1][same:])
            shared += same
    assert tree in UNSHARED or shared > len(rollout.rows)


# hato's own schedule of temperatures refuses another sampler
@pytest.mark.parametrize("tree", [tree for tree in TREES if tree != "hato"])
def test_a_tempered_sampler_draws_other_tokens(tree):
    plain, tempered = (composition.rollout_of(tree, "none", sampler).rows for sampler in ("plain", "tempered"))
    assert [row.response_ids for row in plain] != [row.response_ids for row in tempered]


def test_equal_rewards_teach_nothing_and_are_noticed(monkeypatch):
    cell = Cell("latr", "none", "plain", "tree_gain", "vanilla")
    rollout = composition.rollout_of(*cell[:3])
    equal = rollout._replace(rewards=torch.zeros_like(rollout.rewards))
    monkeypatch.setattr(composition, "rollout_of", lambda *_: equal)
    with pytest.raises(ArithmeticError, match="tree=latr .* the largest gradient is 0"):
        composition.take_step(cell)
