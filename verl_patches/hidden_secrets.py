"""Keeps a config's secrets out of the run's trackers.

verl 0.9.1 gives trackers the whole config, with every value of `runtime_env.env_vars`. This can go when upstream hides
environment variables.
"""

import functools
import re
from types import ModuleType
from typing import Any

SECRET = re.compile(r"(^|_)(api_?key|token|secret|password)$", re.IGNORECASE)


def hide_secrets(tracking: ModuleType) -> None:
    """Let `Tracking` open trackers with a config without secrets."""
    init = tracking.Tracking.__init__

    @functools.wraps(init)
    def init_without_secrets(self, project_name, experiment_name, default_backend="console", config=None):
        init(self, project_name, experiment_name, default_backend, without_secrets(config))

    tracking.Tracking.__init__ = init_without_secrets


def without_secrets(config: Any, is_secret: bool = False) -> Any:
    """Return the config; `<hidden>` stands for the values in `env_vars` and the texts of keys such as `api_key`."""
    if isinstance(config, dict):
        secrets = {key: is_secret or key == "env_vars" for key in config}
        secrets |= {key: True for key, value in config.items() if isinstance(value, str) and SECRET.search(str(key))}
        return {key: without_secrets(value, secrets[key]) for key, value in config.items()}
    if isinstance(config, list):
        return [without_secrets(value, is_secret) for value in config]
    return "<hidden>" if is_secret and config is not None else config
