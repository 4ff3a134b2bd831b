"""How many agent-loop workers and reward workers a run has, where its config leaves the number open.

Upstream places both kinds round-robin on the nodes. Its default of 8 for any cluster would let one event loop drive the
more trajectories, and one process score the more answers, the more nodes there are.
"""

from omegaconf import DictConfig, OmegaConf

WORKERS_A_NODE = 8  # upstream's default, which it has for one node
KEYS = ("actor_rollout_ref.rollout.agent.num_workers", "reward.num_workers")


def scale_workers(config: DictConfig) -> None:
    """Set each of `KEYS` that is null to 8 a node, the nodes of a separate rollout included (`rollout.nnodes`).

    Args:
        config: is changed; `trainer.nnodes` is a number, or refers to one.
    """
    nodes = config.trainer.nnodes + (config.actor_rollout_ref.rollout.get("nnodes") or 0)
    for key in KEYS:
        if OmegaConf.select(config, key) is None:
            OmegaConf.update(config, key, WORKERS_A_NODE * nodes)
