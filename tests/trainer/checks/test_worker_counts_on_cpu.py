"""Agent-loop and reward workers grow with the nodes, unless the user says how many."""

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
