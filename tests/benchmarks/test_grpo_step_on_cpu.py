"""benchmarks/grpo_step.py compares runs that do the same work, and its ratio is that of hand-computed pairs."""

import math

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from benchmarks.grpo_step import SAME, UPSTREAM, ratio_of
from recipe.common.tiny_model import TinyModelConfig, write_tiny_model
from tests.configs import RECIPES, composed
from tests.configs import UPSTREAM as UPSTREAM_CONFIGS
from verl.utils.parts import load_choices

# keys that the benchmark sets at the start of our side, as recipe/common/run_explore.sh does
SET_BY_SCRIPT = {f"actor_rollout_ref.{key}" for key in ("actor.fsdp_config.seed", "model.path", "rollout.seed")}
SET_BY_SCRIPT |= {f"data.{key}" for key in ("seed", "train_files", "val_files")}
SET_BY_SCRIPT |= {f"trainer.{key}" for key in ("default_local_dir", "experiment_name", "project_name")}
# keys of the compared trainers and of the reward manager, which also reports lengths on our side
TYPED = ("algorithm", *(f"actor_rollout_ref.{name}" for name in ("actor", "ref", "rollout")))
COMPARED = {f"{name}._target_" for name in TYPED}
COMPARED |= {f"reward.reward_manager.{key}" for key in ("module.path", "name", "source")}
COMPARED |= {f"trainer.{key}" for key in ("checkpoint_callback_class", "max_actor_ckpt_to_keep", "v1.trainer_mode")}


def leaves(config: DictConfig, prefix: str = "") -> dict:
    values = {}
    for key in config:
        value = config._get_node(key)
        values |= leaves(value, f"{prefix}{key}.") if isinstance(value, DictConfig) else {f"{prefix}{key}": value}
    return values


def test_both_sides_have_the_same_values_where_both_have_a_key(tmp_path):
    load_choices()
    with initialize_config_dir(str(UPSTREAM_CONFIGS), version_base=None):
        search = f"hydra.searchpath=[file://{RECIPES}/common/config]"
        upstream = leaves(compose("ppo_trainer", [search, *UPSTREAM[1:], *SAME]))
    model = write_tiny_model(tmp_path / "model", TinyModelConfig())
    config = composed("explore", "hardware=cpu", "update=tree", f"actor_rollout_ref.model.path={model}", *SAME)
    ours = leaves(config)
    different = {key for key in upstream.keys() & ours.keys() if str(upstream[key]) != str(ours[key])}
    assert different - SET_BY_SCRIPT == COMPARED
    assert str(upstream["trainer.v1.trainer_mode"]) == "sync"
    assert "actor_rollout_ref.rollout.agent.agent_loop_manager_class" not in upstream
    for key, value in {"data.train_batch_size": "16", "actor_rollout_ref.rollout.n": "8"}.items():
        assert str(upstream[key]) == str(ours[key]) == value


def test_the_ratio_is_the_geometric_mean_of_the_pairs():
    # logs of the ratios 2 and 8: mean log 4; deviation log 4 / sqrt 2, so that half is 12.7062 * log 4 / 2
    half = 12.7062047 * math.log(4) / 2
    assert ratio_of([2.0, 8.0], [1.0, 1.0]) == f"4.00 ({4 / math.exp(half):.2f} to {4 * math.exp(half):.2f})"
    assert ratio_of([3.0, 3.0], [2.0, 2.0]) == "1.50 (1.50 to 1.50)"
    with pytest.raises(ValueError):
        ratio_of([1.0], [1.0, 2.0])
