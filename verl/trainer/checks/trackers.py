"""Checks the trackers of a run, which upstream opens only when the workers have started."""

import os
import socket
import urllib.request
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from omegaconf import DictConfig

from verl.trainer.checks.resources.cluster import joins_running_cluster

# Names of trackers whose packages have another name.
PACKAGES = {"vemlp_wandb": "volcengine_ml_platform"}
WITHOUT_PACKAGE = ("console", "file")
CONNECT_SECONDS = 5.0


@dataclass(frozen=True)
class Service:
    """A tracker's server."""

    variable: str  # environment variable with the server's address
    address: str = ""  # its default
    key_file: str = ""  # file with the user's keys, of which one may stand in NAME_API_KEY; empty: there are none
    offline: tuple[str, ...] = ()  # values of NAME_MODE that switch the tracker offline
    settings: tuple[str, ...] = ()  # files of the user's with another address or mode: then nothing is checked

    def check(self, name: str) -> None:
        """Check that the user has a key and the server answers, unless the tracker is offline or behind a proxy."""
        mode, key = f"{name.upper()}_MODE", f"{name.upper()}_API_KEY"
        if os.environ.get(mode, "") in self.offline or any(Path(f).expanduser().exists() for f in self.settings):
            return
        url = urlsplit(os.environ.get(self.variable) or self.address)
        instead = f"leave {name} out" + (f", or set {mode}={self.offline[0]}" if self.offline else "")
        file = Path((self.key_file == "~/.netrc" and os.environ.get("NETRC")) or self.key_file).expanduser()
        saved = file.read_text(errors="replace") if file.is_file() else ""
        if self.key_file and not os.environ.get(key) and (url.hostname or "") not in saved:
            raise ValueError(f"trainer.logger={name} has no key: set {key}, log in, or {instead}")
        if not url.scheme.startswith("http") or not url.hostname or urllib.request.getproxies().get(url.scheme):
            return
        try:
            port = url.port or {"http": 80, "https": 443}[url.scheme]
            socket.create_connection((url.hostname, port), CONNECT_SECONDS).close()
        except OSError as error:
            raise ValueError(
                f"trainer.logger={name}: {self.variable}={url.geturl()} does not answer ({error}): {instead}"
            ) from error


SERVICES = {
    "wandb": Service(
        "WANDB_BASE_URL",
        "https://api.wandb.ai",
        key_file="~/.netrc",
        offline=("offline", "disabled", "dryrun"),
        settings=("wandb/settings", "~/.config/wandb/settings"),
    ),
    "swanlab": Service(
        "SWANLAB_API_HOST",
        "https://api.swanlab.cn",
        key_file="~/.swanlab/.netrc",
        offline=("offline", "local", "disabled"),
    ),
    "mlflow": Service("MLFLOW_TRACKING_URI"),
}


def check_trackers(config: DictConfig) -> None:
    """Check that each tracker and its package exist, that the user has its key and its server answers (not in a cluster
    that already runs, where another machine may open it)."""
    from verl.utils.tracking import Tracking

    trainer = config.trainer
    for name in [trainer.logger] if isinstance(trainer.logger, str) else trainer.logger:
        if name not in Tracking.supported_backend:
            raise ValueError(f"trainer.logger has no tracker {name}; known: {', '.join(Tracking.supported_backend)}")
        package = PACKAGES.get(name, name)
        # a folder of the package's name that a tracker wrote, such as wandb, has no origin
        if name not in WITHOUT_PACKAGE and getattr(find_spec(package), "origin", None) is None:
            raise ValueError(
                f"trainer.logger={name}: the package {package} is not installed; install it, or leave {name} out"
            )
        if name in SERVICES and not joins_running_cluster(config):
            SERVICES[name].check(name)
