"""Keeps a run's trackers whole over resumes, and the config's secrets out of them.

verl 0.9.1 opens a new run of wandb and MLflow at each resume, and its config shows every value of
`runtime_env.env_vars`. A run that resumes from a checkpoint goes on in the runs that `trackers.json` in its folder
names. This can go when upstream keeps the ids and hides environment variables.
"""

import functools
import json
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from verl.utils.atomic_files import replacing

logger = logging.getLogger(__name__)

IDS_FILE = "trackers.json"  # environment variable of a tracker -> id of the run
SECRET = re.compile(r"(^|_)(api_?key|token|secret|password)$", re.IGNORECASE)


def keep_runs_whole(tracking: ModuleType) -> None:
    """Let `Tracking` go on in the same runs, without secrets."""
    tracking.Tracking.__init__ = in_one_run(tracking.Tracking.__init__)
    tracking._compute_mlflow_params_from_objects = new_params(tracking._compute_mlflow_params_from_objects)


def in_one_run(init: Callable) -> Callable:
    """Return the constructor of `Tracking` that goes on in the runs of an earlier attempt, and keeps their ids. What
    the user has set, such as WANDB_RUN_ID, takes precedence."""

    @functools.wraps(init)
    def call(self, project_name, experiment_name, default_backend="console", config=None):
        trainer = (config or {}).get("trainer") or {}
        folder, ids = Path(trainer.get("default_local_dir") or "."), {}
        resumes = trainer.get("resume_mode") != "disable" and (folder / "latest_checkpointed_iteration.txt").exists()
        if resumes and (folder / IDS_FILE).exists():
            ids = json.loads((folder / IDS_FILE).read_text())
        added = {name: value for name, value in ids.items() if name not in os.environ}
        os.environ.update(added)
        try:
            init(self, project_name, experiment_name, default_backend, without_secrets(config))
        finally:
            for name in added:
                os.environ.pop(name, None)
        if "wandb" in self.logger:
            ids |= {"WANDB_RUN_ID": self.logger["wandb"].run.id, "WANDB_RESUME": "allow"}
        if "mlflow" in self.logger:
            import mlflow

            ids["MLFLOW_RUN_ID"] = mlflow.active_run().info.run_id
        if ids:
            with replacing(folder / IDS_FILE) as unfinished:
                unfinished.write_text(json.dumps(ids))

    return call


def without_secrets(config: Any, is_secret: bool = False) -> Any:
    """Return the config; `<hidden>` stands for the values in `env_vars` and the texts of keys such as `api_key`."""
    if isinstance(config, dict):
        secrets = {key: is_secret or key == "env_vars" for key in config}
        secrets |= {key: True for key, value in config.items() if isinstance(value, str) and SECRET.search(str(key))}
        return {key: without_secrets(value, secrets[key]) for key, value in config.items()}
    if isinstance(config, list):
        return [without_secrets(value, is_secret) for value in config]
    return "<hidden>" if is_secret and config is not None else config


def new_params(compute: Callable) -> Callable:
    """Return the function of MLflow's parameters that leaves out those of the earlier attempt, which cannot change."""

    @functools.wraps(compute)
    def call(*args, **kwargs):
        import mlflow

        params, logged = compute(*args, **kwargs), mlflow.active_run().data.params
        if changed := sorted(key for key, value in params.items() if logged.get(key, str(value)) != str(value)):
            logger.warning("MLflow keeps the run's first values of %s, which have changed", ", ".join(changed))
        return {key: value for key, value in params.items() if key not in logged}

    return call
