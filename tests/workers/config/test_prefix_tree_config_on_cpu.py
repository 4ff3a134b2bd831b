"""The switch `use_prefix_tree` chooses the engine, in the actor's and the reference policy's config."""

import pytest
from omegaconf import OmegaConf
from verl.utils.config import omega_conf_to_dataclass

from tests.configs import composed
from verl.workers.engine import EngineRegistry

COMMON = ("hardware=cpu", "task=countdown")


def run_config(*overrides: str):
    return composed("explore", *COMMON, *overrides)


def engines(config) -> list[str]:
    """The classes of the actor's and the reference policy's engines, which upstream's worker builds from these."""
    OmegaConf.resolve(config.actor_rollout_ref)
    OmegaConf.set_struct(config, False)
    ref = config.actor_rollout_ref.ref
    for key in ("log_prob_micro_batch_size", "log_prob_micro_batch_size_per_gpu"):  # upstream's worker does this
        ref[key.replace("log_prob", "ppo")] = ref.pop(key)
    ref.use_dynamic_bsz, ref.ppo_max_token_len_per_gpu = (
        ref.pop(f"log_prob_{key}") for key in ("use_dynamic_bsz", "max_token_len_per_gpu")
    )
    sections = [omega_conf_to_dataclass(config.actor_rollout_ref[name]) for name in ("actor", "ref")]
    return [EngineRegistry.get_engine_cls("language_model", part.engine.strategy).__name__ for part in sections]


@pytest.fixture(autouse=True)
def engines_of_gpus(monkeypatch):
    monkeypatch.setenv("VERL_ENGINE_DEVICE", "cuda")


ACTOR, ROWS_FOR_REF = "actor_rollout_ref.actor.use_prefix_tree=true", "actor_rollout_ref.ref.use_prefix_tree=false"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], ["FSDPEngineWithLMHead"] * 2),
        ([ACTOR], ["PrefixTreeEngine"] * 2),
        (["update=tree"], ["PrefixTreeEngine"] * 2),
        ([ACTOR, ROWS_FOR_REF], ["PrefixTreeEngine", "FSDPEngineWithLMHead"]),
    ],
)
def test_the_actors_switch_is_the_reference_policys_too_unless_that_has_its_own(overrides, expected):
    assert engines(run_config(*overrides)) == expected


def test_a_key_that_forbids_a_prefix_tree_is_named():
    config = run_config(ACTOR, "actor_rollout_ref.actor.shuffle=true")
    with pytest.raises(Exception) as error:
        omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert "use_prefix_tree=true with shuffle=True: set shuffle=false" in str(error.value.__cause__ or error.value)
