"""Trackers see no secrets of the config."""

from types import SimpleNamespace

from verl_patches.hidden_secrets import hide_secrets


def test_trackers_get_the_config_without_secrets():
    class Tracking:
        def __init__(self, project_name, experiment_name, default_backend="console", config=None):
            self.arguments = (project_name, experiment_name, default_backend, config)

    hide_secrets(SimpleNamespace(Tracking=Tracking))
    config = {
        "ray_kwargs": {"runtime_env": {"env_vars": {"HF_TOKEN": "s3cr3t", "LOCAL_RANK": 1, "EMPTY": None}}},
        "search": [{"api_key": "s3cr3t", "API_KEY": "s3cr3t", "cache": None}],
        "data": {"max_token": 8, "token": 8, "tokenizer": "path", "password": "s3cr3t"},
    }
    hidden = {
        "ray_kwargs": {"runtime_env": {"env_vars": {"HF_TOKEN": "<hidden>", "LOCAL_RANK": "<hidden>", "EMPTY": None}}},
        "search": [{"api_key": "<hidden>", "API_KEY": "<hidden>", "cache": None}],
        "data": {"max_token": 8, "token": 8, "tokenizer": "path", "password": "<hidden>"},
    }
    assert Tracking("project", "run", ["wandb"], config).arguments == ("project", "run", ["wandb"], hidden)
    assert Tracking("project", "run").arguments == ("project", "run", "console", None)
