"""A tracker that cannot be opened, and a wrong key of the table of prompt groups, are named before anything starts."""

import socket
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


def listening() -> socket.socket:
    server = socket.socket()
    server.bind(("127.0.0.1", 0))
    server.listen()
    return server


@pytest.mark.parametrize("tracker", ["wandb", "swanlab"])
def test_a_tracker_without_a_key_is_refused_unless_it_is_offline(tmp_path, monkeypatch, tracker):
    monkeypatch.setattr("verl.trainer.checks.trackers.find_spec", lambda package: SimpleNamespace(origin=package))
    monkeypatch.setenv("HOME", str(tmp_path))
    upper, server = tracker.upper(), listening()
    for name in (f"{upper}_API_KEY", f"{upper}_MODE", "NETRC", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    address = f"http://127.0.0.1:{server.getsockname()[1]}"
    monkeypatch.setenv({"wandb": "WANDB_BASE_URL", "swanlab": "SWANLAB_API_HOST"}[tracker], address)
    with pytest.raises(ValueError, match=f"trainer.logger={tracker} has no key: set {upper}_API_KEY, .*{upper}_MODE="):
        check(f"trainer.logger=[console,{tracker}]")
    monkeypatch.setenv(f"{upper}_API_KEY", "k" * 40)
    check(f"trainer.logger=[console,{tracker}]")
    monkeypatch.delenv(f"{upper}_API_KEY")
    saved = tmp_path / {"wandb": ".netrc", "swanlab": ".swanlab/.netrc"}[tracker]
    saved.parent.mkdir(exist_ok=True)
    saved.write_text("machine 127.0.0.1 login user password k")
    check(f"trainer.logger=[console,{tracker}]")
    server.close()
    with pytest.raises(ValueError, match=f"trainer.logger={tracker}: .*{address} does not answer"):
        check(f"trainer.logger=[console,{tracker}]")
    monkeypatch.setenv(f"{upper}_MODE", "offline")
    saved.unlink()
    check(f"trainer.logger=[console,{tracker}]")


@pytest.mark.parametrize("settings", ["wandb/settings", ".config/wandb/settings"])
def test_settings_of_wandbs_own_commands_are_trusted(tmp_path, monkeypatch, settings):
    """`wandb offline` and `wandb login --host=...` write an address and a mode into them."""
    monkeypatch.setattr("verl.trainer.checks.trackers.find_spec", lambda package: SimpleNamespace(origin=package))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in ("WANDB_API_KEY", "WANDB_MODE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="has no key"):
        check("trainer.logger=[wandb]")
    (tmp_path / settings).parent.mkdir(parents=True)
    (tmp_path / settings).write_text("[default]\nmode = offline\n")
    check("trainer.logger=[wandb]")


def test_an_mlflow_server_that_does_not_answer_is_named(monkeypatch):
    monkeypatch.setattr("verl.trainer.checks.trackers.find_spec", lambda package: SimpleNamespace(origin=package))
    server = listening()
    address = f"http://127.0.0.1:{server.getsockname()[1]}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    check("trainer.logger=mlflow")
    server.close()
    with pytest.raises(ValueError, match=f"trainer.logger=mlflow: MLFLOW_TRACKING_URI={address} does not answer"):
        check("trainer.logger=mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:////tmp/mlruns.db")
    check("trainer.logger=mlflow")
