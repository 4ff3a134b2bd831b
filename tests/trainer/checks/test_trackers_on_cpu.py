"""A tracker that cannot be opened, and a wrong key of the table of prompt groups, are named before anything starts."""

import sys

import pytest

from tests.configs import composed
from verl.trainer.checks.trackers import check_trackers


def check(*overrides: str) -> None:
    check_trackers(composed("explore", *overrides))


def test_installed_trackers_pass():
    check("trainer.logger=[console,file,wandb,tensorboard]")
    check("trainer.logger=wandb")


@pytest.mark.parametrize(("tracker", "package"), [("wandb", "wandb"), ("vemlp_wandb", "volcengine_ml_platform")])
def test_a_missing_package_is_named(tmp_path, monkeypatch, tracker, package):
    (tmp_path / package).mkdir()  # wandb's own files, in a folder in which Python looks for modules
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, package, raising=False)
    sys.path_importer_cache.clear()
    with pytest.raises(ValueError, match=f"trainer.logger={tracker}: the package {package} is not installed; inst"):
        check(f"trainer.logger=[console,{tracker}]")


def test_an_unknown_tracker_is_named_with_the_known_ones():
    with pytest.raises(ValueError, match="trainer.logger has no tracker wandbb; known: .*wandb.*tensorboard"):
        check("trainer.logger=[console,wandbb]")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.group_table.prompts=-1", "trainer.group_table.prompts=-1: expected at least 0"),
        ("trainer.group_table.characters=1", "trainer.group_table.characters=1: expected at least 2"),
        ("+trainer.group_table.rows=4", "trainer.group_table has no key rows; known: prompts, responses, characters"),
    ],
)
def test_a_wrong_key_of_the_table_is_named(override, message):
    with pytest.raises(ValueError, match=message):
        check(override)


def test_a_config_without_the_table_passes():
    check_trackers(composed("grpo_trainer"))
