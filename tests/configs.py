"""Configs as Hydra composes them, for hundreds of tests: what takes half a second is done once for the same groups."""

from functools import cache
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

import verl.trainer

RECIPES = Path(__file__).resolve().parents[1] / "recipe"
UPSTREAM = Path(verl.trainer.__path__[0]) / "config"


def composed(name: str, *overrides: str, recipe: str = "common") -> DictConfig:
    """A recipe's config with the overrides of a command line, for an experiment x.

    Groups (`tree=latr`) are composed; values (`actor_rollout_ref.rollout.n=4`) are set in a copy, as Hydra sets them.
    """
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    groups = tuple(override.input_line for override in parsed if "." not in override.key_or_group)
    config = of_groups(recipe, name, groups).copy()
    ConfigLoaderImpl._apply_overrides_to_config([each for each in parsed if "." in each.key_or_group], config)
    return config


@cache
def of_groups(recipe: str, name: str, groups: tuple[str, ...]) -> DictConfig:
    with initialize_config_dir(str(RECIPES / recipe / "config"), version_base=None):
        search = f"hydra.searchpath=[file://{UPSTREAM},pkg://recipe.common.config]"
        return compose(name, [search, "trainer.experiment_name=x", *groups])
