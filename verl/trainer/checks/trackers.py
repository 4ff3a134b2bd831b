"""Checks the trackers of a run, which upstream opens only when the workers have started."""

import os
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from omegaconf import DictConfig

from verl.trainer.checks.resources.cluster import joins_running_cluster

# Names of trackers whose packages have another name.
PACKAGES = {"vemlp_wandb": "volcengine_ml_platform"}
WITHOUT_PACKAGE = ("console", "file")
WANDB_SETTINGS = ("wandb/settings", "~/.config/wandb/settings")  # `wandb offline` and `wandb login --host` write them


def check_trackers(config: DictConfig) -> None:
    """Check that each tracker and its package exist, and that wandb has a key (not in a cluster that already runs,
    where another machine may open it)."""
    from verl.utils.tracking import Tracking

    loggers = config.trainer.logger
    for name in [loggers] if isinstance(loggers, str) else loggers:
        if name not in Tracking.supported_backend:
            raise ValueError(f"trainer.logger has no tracker {name}; known: {', '.join(Tracking.supported_backend)}")
        package = PACKAGES.get(name, name)
        # a folder of the package's name that a tracker wrote, such as wandb, has no origin
        if name not in WITHOUT_PACKAGE and getattr(find_spec(package), "origin", None) is None:
            raise ValueError(
                f"trainer.logger={name}: the package {package} is not installed; install it, or leave {name} out"
            )
        if name == "wandb" and not joins_running_cluster(config):
            check_wandb_key()


def check_wandb_key() -> None:
    """Check that wandb has a key, unless it is offline or has settings of the user's, which may hold anything."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE", "online") != "online":
        return
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    netrc = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    has_login = netrc.is_file() and host in netrc.read_text(errors="replace")
    if not has_login and not any(Path(file).expanduser().exists() for file in WANDB_SETTINGS):
        raise ValueError(
            "trainer.logger=wandb has no key: set WANDB_API_KEY, log in, leave wandb out, or set WANDB_MODE=offline"
        )
