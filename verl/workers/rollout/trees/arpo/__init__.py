"""Trajectories that fork where the model is unsure (ARPO, AEPO), `tree=arpo`."""

from verl.workers.rollout.trees.arpo.config import ARPOConfig
from verl.workers.rollout.trees.arpo.policy import Policy

__all__ = ["ARPOConfig", "Policy"]
