"""A tracker that cannot be opened, and a wrong key of the table of prompt groups, are named before anything starts."""

import sys

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


def test_a_config_without_the_table_passes():
    check_trackers(composed("grpo_trainer"))
