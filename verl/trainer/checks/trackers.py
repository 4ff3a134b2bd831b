"""Checks the trackers of a run, which upstream opens only when the workers have started."""

from importlib.util import find_spec

from omegaconf import DictConfig

from verl.trainer.ppo.group_table import GroupTableKeys
from verl.workers.config.keys import read_keys

# Names of trackers whose packages have another name.
PACKAGES = {"vemlp_wandb": "volcengine_ml_platform"}
WITHOUT_PACKAGE = ("console", "file")


def check_trackers(config: DictConfig) -> None:
    """Check that the trackers exist and their packages are installed, and the keys of the table of prompt groups."""
    from verl.utils.tracking import Tracking

    trainer = config.trainer
    for name in [trainer.logger] if isinstance(trainer.logger, str) else trainer.logger:
        if name not in Tracking.supported_backend:
            raise ValueError(f"trainer.logger has no tracker {name}; known: {', '.join(Tracking.supported_backend)}")
        package = PACKAGES.get(name, name)
        if name not in WITHOUT_PACKAGE and not _is_installed(package):
            raise ValueError(
                f"trainer.logger={name}: the package {package} is not installed; install it with `pip install "
                f"{package}`, or leave {name} out"
            )
    read_keys(GroupTableKeys, trainer.get("group_table"), "trainer.group_table")


def _is_installed(package: str) -> bool:
    """Return whether a package can be imported; a folder of its name that a tracker wrote, such as wandb, is none."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None
