"""The papers' values are the defaults, and a value out of range is refused by its key's full name.

tests/conformance tries unknown keys and wrong types of every part.
"""

from dataclasses import asdict

import pytest

from tests.configs import composed
from tests.recipe.arpo.toy_agent import TOKENIZER, encode
from tests.refusals import refused, says
from verl.trainer.checks.parts import check_parts, check_typed_sections
from verl.utils.parts import parts
from verl.workers.rollout.tree_builder import policy_class

DEFAULTS = {
    "cure": {"n1": 4, "n2": 3, "critical_top_k": 20, "min_characters": 2, "entropy_top_k": 20},
    "treepo": {"segment_length": 512, "max_depth": 14, "divergence": 2, "first_round_divergence": 8}
    | {"repetition_length": 32, "repetition_count": 8},
}

# keys of `actor` that a choice of a loss sets
CHOICES = {
    "archer": {"low_entropy_clip_ratio_low": 0.2, "low_entropy_clip_ratio_high": 0.2, "token_entropy_quantile": 0.8}
    | {"high_entropy_clip_ratio_low": 0.5, "high_entropy_clip_ratio_high": 0.5, "clip_ratio_c": 10.0}
    | {"use_kl_loss": True, "kl_loss_coef": 0.0, "low_entropy_kl_loss_scale_coef": 0.001},
    "aspo": {"low_entropy_clip_ratio_low": 0.2, "low_entropy_clip_ratio_high": 0.2, "clip_ratio_c": 3.0}
    | {"high_entropy_clip_ratio_low": 0.4, "high_entropy_clip_ratio_high": 0.4, "use_kl_loss": False},
    "forking": {"forking_loss": "vanilla", "forking_ratio": 0.2}
    | {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 10.0},
    "gspo": {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4, "loss_agg_mode": "seq-mean-token-mean"},
    "sapo": {"loss_agg_mode": "seq-mean-token-mean"},
    "cispo": {"clip_ratio_low": 1.0},
    "dppo_tv": {"clip_ratio_low": 0.15},
    "dppo_kl": {"clip_ratio_low": 0.05},
}


@pytest.mark.parametrize(("overrides", "message"), refused(__file__, "range"), ids=lambda text: text[-40:])
def test_a_value_out_of_range_is_refused_by_its_key(overrides, message):
    config = composed("explore", "hardware=cpu", *overrides.split())
    with pytest.raises(ValueError) as error:
        check_typed_sections(config)
        check_parts(config)
    key = overrides.split()[1].partition("=")[0].removeprefix("actor_rollout_ref.")
    assert says(error.value, message) and (key in str(error.value) or key.rpartition(".")[2] in message)


@pytest.mark.parametrize("tree", DEFAULTS)
def test_the_defaults_are_the_papers(tree):
    assert asdict(parts("tree")[tree].keys()) == DEFAULTS[tree]


@pytest.mark.parametrize("loss", CHOICES)
def test_a_choice_of_a_loss_has_the_papers_values(loss):
    actor = composed("explore", "hardware=cpu", f"loss={loss}").actor_rollout_ref.actor
    assert {key: actor[key] for key in CHOICES[loss]} == CHOICES[loss]


@pytest.mark.parametrize(
    ("tree", "n", "keys"),
    [
        ("branpo", 6, {"tails": 2}),
        ("deep_grpo", 10, {"chains": 4, "branches": 3}),
        ("treepo", 16, {"segment_length": 64, "divergence": 4}),
    ],
)
def test_a_policy_has_the_configs_keys_and_the_tokenizers_text(tree, n, keys):
    overrides = [f"actor_rollout_ref.rollout.custom.{tree}.{key}={value}" for key, value in keys.items()]
    config = composed("explore", "hardware=cpu", f"tree={tree}", f"actor_rollout_ref.rollout.n={n}", *overrides)
    policy = policy_class(tree).from_config(config, TOKENIZER)
    assert policy.keys == parts("tree")[tree].keys(**keys)
    tokens = encode("a")
    assert policy.text_of(tokens if tree == "treepo" else tokens[0]) == "a"


def test_a_switch_of_a_loss_that_is_not_wrapped_is_refused():
    keys = [f"actor_rollout_ref.actor.{key}" for key in ("forking_loss=aepo", "adaptive_clip=true")]
    with pytest.raises(ValueError, match="loss_mode=forking does not know adaptive_clip"):
        check_typed_sections(composed("explore", "hardware=cpu", "loss=forking", *keys))
