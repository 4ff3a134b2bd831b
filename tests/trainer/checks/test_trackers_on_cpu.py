"""A tracker that cannot be opened is named before anything starts."""

import sys
from types import SimpleNamespace

import pytest

from tests.configs import composed
from verl.trainer.checks.trackers import check_trackers


def check(*overrides: str) -> None:
    check_trackers(composed("explore", *overrides))


@pytest.mark.parametrize(("tracker", "package"), [("wandb", "wandb"), ("vemlp_wandb", "volcengine_ml_platform")])
def test_a_missing_package_is_named(tmp_path, monkeypatch, tracker, package):
    (tmp_path / package).mkdir()  # wandb's own files, in a folder in which Python looks for modules
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, package, raising=False)
    sys.path_importer_cache.clear()
    with pytest.raises(ValueError, match=f"trainer.logger={tracker}: the package {package} is not installed; inst"):
        check(f"trainer.logger=[console,{tracker}]")


@pytest.fixture
def without_key(tmp_path, monkeypatch):
    """The home of a user whose wandb is installed, and has no key."""
    monkeypatch.setattr("verl.trainer.checks.trackers.find_spec", lambda package: SimpleNamespace(origin=package))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "NETRC", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="trainer.logger=wandb has no key: set WANDB_API_KEY, .*WANDB_MODE=offline"):
        check("trainer.logger=[console,wandb]")
    return tmp_path


@pytest.mark.usefixtures("without_key")
@pytest.mark.parametrize("variable", ["WANDB_API_KEY=key", "WANDB_MODE=offline", "RAY_ADDRESS=10.0.0.1:6379"])
def test_a_variable_with_a_key_or_a_mode_is_enough(monkeypatch, variable):
    monkeypatch.setenv(*variable.split("="))
    check("trainer.logger=[console,wandb]")


@pytest.mark.parametrize("file", [".netrc", "wandb/settings", ".config/wandb/settings"])
def test_a_login_of_wandbs_own_commands_is_enough(without_key, file):
    (without_key / file).parent.mkdir(parents=True, exist_ok=True)
    (without_key / file).write_text("machine api.wandb.ai login user password key")
    check("trainer.logger=wandb")
