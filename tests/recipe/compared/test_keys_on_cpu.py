"""The papers' values are the defaults, and a value out of range is refused by its key's full name.

tests/conformance tries unknown keys and wrong types of every part.
"""

from dataclasses import asdict

import pytest
import torch

from tests.configs import composed
from tests.recipe.arpo.toy_agent import TOKENIZER, encode
from tests.recipe.compared.credit import advantage
from tests.refusals import refused, says
from tests.tables import table
from verl.trainer.checks.parts import check_parts, check_typed_sections
from verl.utils.parts import parts, tree_part


@pytest.mark.parametrize(("overrides", "message"), refused(__file__, "range"), ids=lambda text: text[-40:])
def test_a_value_out_of_range_is_refused_by_its_key(overrides, message):
    config = composed("explore", "hardware=cpu", *overrides.split())
    with pytest.raises(ValueError) as error:
        check_typed_sections(config)
        check_parts(config)
    key = overrides.split()[1].partition("=")[0].removeprefix("actor_rollout_ref.")
    assert says(error.value, message) and (key in str(error.value) or key.rpartition(".")[2] in message)


@pytest.mark.parametrize(("tree", "values"), table(__file__, "defaults of trees"))
def test_the_defaults_are_the_papers(tree, values):
    assert asdict(parts("tree")[tree].keys()) == values


@pytest.mark.parametrize(("loss", "values"), table(__file__, "values of losses"))
def test_a_choice_of_a_loss_has_the_papers_values(loss, values):
    actor = composed("explore", "hardware=cpu", f"loss={loss}").actor_rollout_ref.actor
    assert {key: actor[key] for key in values} == values


@pytest.mark.parametrize(("tree", "n", "keys"), table(__file__, "keys of policies"))
def test_a_policy_has_the_configs_keys_and_the_tokenizers_text(tree, n, keys):
    overrides = [f"actor_rollout_ref.rollout.custom.{tree}.{key}={value}" for key, value in keys.items()]
    config = composed("explore", "hardware=cpu", f"tree={tree}", f"actor_rollout_ref.rollout.n={n}", *overrides)
    policy = tree_part(tree).policy.from_config(config, TOKENIZER)
    assert policy.keys == parts("tree")[tree].keys(**keys)
    tokens = encode("a")
    assert (policy.decode(tokens) if tree == "treepo" else policy.text_of(tokens[0])) == "a"


def test_a_switch_of_a_loss_that_is_not_wrapped_is_refused():
    keys = [f"actor_rollout_ref.actor.{key}" for key in ("forking_loss=aepo", "adaptive_clip=true")]
    with pytest.raises(ValueError, match="loss_mode=forking does not know adaptive_clip"):
        check_typed_sections(composed("explore", "hardware=cpu", "loss=forking", *keys))


@pytest.mark.parametrize("name", ["branpo", "cure", "tree_grpo", "treepo"])
def test_rows_without_a_tree_are_compared_with_their_group(name):
    without = torch.full((3, 2), -1)
    plain = advantage(name, [2, 0, 7], without, ["a", "a", "b"], mask=torch.ones(3, 2), norm=False)
    assert plain.tolist() == [[1, 1], [-1, -1], [0, 0]]
