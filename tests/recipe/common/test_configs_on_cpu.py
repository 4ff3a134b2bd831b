"""Every config composes with both hardware profiles and passes upstream's typed configs."""

import pytest
from omegaconf import OmegaConf

from tests.configs import composed
from verl.trainer.checks.parts import check_typed_sections
from verl.trainer.checks.resources.cluster import check_ray_resources, config_asks_for_cpu


@pytest.mark.parametrize("hardware", ["cpu", "gpu"])
@pytest.mark.parametrize("name", ["grpo_trainer", "dapo_trainer"])
def test_composes_and_is_typed(name, hardware, monkeypatch):
    monkeypatch.setenv("PWD", "/somewhere")
    config = composed(name, f"hardware={hardware}", "trainer.experiment_name=test")
    check_typed_sections(config)
    if hardware == "cpu":  # the GPU profile counts the CPUs of the node that it runs on
        check_ray_resources(config)
    assert config_asks_for_cpu(config) == (hardware == "cpu")
    assert config.trainer.device == {"cpu": "cpu", "gpu": "cuda"}[hardware]
    OmegaConf.resolve(config.ray_kwargs)
    env = config.ray_kwargs.ray_init.runtime_env.env_vars
    assert env.VERL_FILE_LOGGER_PATH == "/somewhere/outputs/test/metrics.jsonl"
    assert config.actor_rollout_ref.rollout.agent.agent_loop_manager_class.endswith(".GroupAgentLoopManager")


def test_nothing_of_the_cpu_profile_is_in_the_gpu_profile():
    config = OmegaConf.to_yaml(composed("grpo_trainer", "hardware=gpu").ray_kwargs)
    assert "VERL_PLATFORM" not in config and "num_gpus" not in config


def test_dapo_is_grpo_with_the_papers_four_changes(monkeypatch):
    """arXiv 2503.14476: clip-higher 0.2/0.28, dynamic sampling, token-mean loss, overlong shaping."""
    dapo, grpo = (composed(f"{name}_trainer", "hardware=cpu") for name in ("dapo", "grpo"))
    actor = dapo.actor_rollout_ref.actor
    assert (actor.clip_ratio_low, actor.clip_ratio_high, actor.loss_agg_mode) == (0.2, 0.28, "token-mean")
    assert dapo.algorithm.filter_groups.enable and not grpo.algorithm.filter_groups.enable
    assert dapo.algorithm.filter_groups.metric == "acc"
    shaping = dapo.reward.reward_kwargs.overlong_buffer_cfg
    assert shaping.enable and 0 < shaping.len <= dapo.data.max_response_length
    assert not grpo.reward.reward_kwargs.overlong_buffer_cfg.enable
    assert dapo.algorithm.adv_estimator == grpo.algorithm.adv_estimator == "grpo"


def test_ray_logical_cpus_can_be_set_from_the_environment(monkeypatch):
    monkeypatch.setenv("RAY_LOGICAL_CPUS", "40")
    assert composed("grpo_trainer", "hardware=cpu").ray_kwargs.ray_init.num_cpus == 40
