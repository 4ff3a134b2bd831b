"""`explore.yaml` as a command line composes it, with its own search path."""

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from recipe.common.menu import CONFIG
from tests.configs import UPSTREAM
from verl.utils.parts import load_choices

SEARCH_PATH = list(OmegaConf.load(CONFIG / "explore.yaml").hydra.searchpath)


def explore(*overrides: str, return_hydra_config: bool = False) -> DictConfig:
    """Return the config of a run put together from parts, for an experiment x."""
    load_choices()
    search = f"hydra.searchpath=[file://{UPSTREAM},{','.join(SEARCH_PATH)}]"
    with initialize_config_dir(str(CONFIG), version_base=None):
        return compose(
            "explore", [search, "trainer.experiment_name=x", *overrides], return_hydra_config=return_hydra_config
        )
