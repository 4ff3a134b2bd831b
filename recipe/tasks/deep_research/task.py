"""Registers `task=reasoning` and `task=deepsearch`, and their reward, which the made search task shares."""

from pathlib import Path

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from verl.utils.tasks import register_task

REWARD = OmegaConf.load(Path(__file__).with_name("reward.yaml"))
ConfigStore.instance().store(name="deep_research_reward", node=REWARD, package="_global_")
register_task("reasoning", "Computation and knowledge with python and search: ARPO's sizes", file="reasoning.yaml")
register_task("deepsearch", "Deep search: longer responses, more calls; AEPO's sizes", file="deepsearch.yaml")
