"""Agent-loop and reward workers grow with the nodes, unless the user says how many."""

import inspect
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from verl.utils.config import omega_conf_to_dataclass

import verl.trainer
from verl.trainer.checks.settle import scale_workers

UPSTREAM = Path(verl.trainer.__path__[0]) / "config"
NAME = "actor_rollout_ref.rollout.name=vllm"
OPEN = ("actor_rollout_ref.rollout.agent.num_workers=null", "reward.num_workers=null")


def counts(*overrides: str) -> tuple[int, int]:
    """Agent-loop and reward workers of upstream's config with these overrides."""
    with initialize_config_dir(str(UPSTREAM), version_base=None):
        config = compose("ppo_trainer", [NAME, *overrides])
    scale_workers(config)
    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    assert rollout.agent.num_workers == config.actor_rollout_ref.rollout.agent.num_workers
    return rollout.agent.num_workers, config.reward.num_workers


@pytest.mark.parametrize(
    ("overrides", "workers"),
    [
        ((*OPEN, "trainer.nnodes=1"), (8, 8)),
        ((*OPEN, "trainer.nnodes=4"), (32, 32)),
        ((*OPEN, "trainer.nnodes=4", "actor_rollout_ref.rollout.nnodes=2"), (48, 48)),
        (("trainer.nnodes=4", "reward.num_workers=null"), (8, 32)),
        (("trainer.nnodes=4", "reward.num_workers=1", OPEN[0]), (32, 1)),
    ],
)
def test_eight_a_node_where_the_number_is_open(overrides, workers):
    assert counts(*overrides) == workers


def test_an_open_number_passes_upstreams_typed_config():
    with initialize_config_dir(str(UPSTREAM), version_base=None):
        config = compose("ppo_trainer", [NAME, *OPEN])
    assert omega_conf_to_dataclass(config.actor_rollout_ref.rollout).agent.num_workers is None


def test_upstream_places_both_kinds_of_workers_round_robin_on_the_nodes():
    from verl.experimental.agent_loop.agent_loop import AgentLoopManager
    from verl.experimental.reward_loop.reward_loop import RewardLoopManager

    placements = (AgentLoopManager._init_agent_loop_workers, RewardLoopManager._init_reward_loop_workers)
    for source, key in zip(
        map(inspect.getsource, placements), ("agent.num_workers", "reward.num_workers"), strict=True
    ):
        assert key in source and "node_ids[i % len(node_ids)]" in source
