"""Sets the numbers of agent-loop workers and reward workers that a run's config leaves open.

Upstream places workers of both kinds round-robin on the nodes. Its default is 8 for a cluster of any size, so that on a
larger cluster each event loop would drive more trajectories and each process would score more answers.
"""

from omegaconf import DictConfig, OmegaConf

WORKERS_A_NODE = 8  # upstream's default for a whole cluster
KEYS = ("actor_rollout_ref.rollout.agent.num_workers", "reward.num_workers")


def scale_workers(config: DictConfig) -> None:
    """Set each key of `KEYS` that is null to 8 for each node, including nodes of a separate rollout (`rollout.nnodes`).

    Args:
        config: the composed config, which is changed.
    """
    nodes = config.trainer.nnodes + (config.actor_rollout_ref.rollout.get("nnodes") or 0)
    for key in KEYS:
        if OmegaConf.select(config, key) is None:
            OmegaConf.update(config, key, WORKERS_A_NODE * nodes)
