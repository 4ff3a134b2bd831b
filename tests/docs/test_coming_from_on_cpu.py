"""docs/coming_from.md is true: commands compose and pass a dry run's checks of the config, and so do overrides, or they
are refused where the page says so. Nothing is started: a shim takes the place of python."""

import re
from pathlib import Path
from typing import NamedTuple

import pytest
from omegaconf import OmegaConf

from tests.configs import composed, key_of
from tests.docs.commands import calls_of, composed_as_started, configs_of
from verl.trainer.checks.parts import check_parts, check_typed_sections
from verl.trainer.checks.preflight import check_micro_batches_and_servers
from verl.trainer.checks.settle import settle
from verl.trainer.checks.values import check_registered, check_root_keys

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/coming_from.md").read_text()
# section -> the config to which its overrides are added
CONFIGS = {
    "HAPO": ("hapo", "hapo_math_trainer"),
    "LATR": ("latr", "dapo_math_trainer"),
    "ARPO": ("arpo", "arpo_trainer", "task=reasoning"),
    "HATO": ("hato", "hato_notes_trainer", "task=math"),
}
OVERRIDE = re.compile(
    r"[+~]*(algorithm|actor_rollout_ref|reward|reward_model|custom_reward_function|hato|data|trainer)\.\S+=\S+"
)


class Row(NamedTuple):
    section: str
    there: str
    here: str


def rows() -> list[Row]:
    found = []
    for part in PAGE.split("\n## ")[1:]:
        lines = [line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith("| ")][1:]
        found += [Row(part.split()[0].rstrip("'s"), *line) for line in lines]
    return found


def spans(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def overrides(text: str) -> list[str]:
    return [span for span in spans(text) if OVERRIDE.fullmatch(span)]


COMMANDS = list(
    dict.fromkeys(span for row in rows() for span in spans(row.here) if re.match(r"([A-Z_]+=\S+ )*bash ", span))
)


def dry_run(recipe: str, name: str, *arguments: str) -> None:
    """Compose a config and make the checks of a dry run that need neither model nor data."""
    config = composed(name, *arguments, recipe=recipe)
    OmegaConf.set_struct(config, False)
    check_root_keys(config)
    settle(config)
    for check in (check_typed_sections, check_registered, check_micro_batches_and_servers, check_parts):
        check(config)


@pytest.fixture(autouse=True)
def search_key(monkeypatch):
    monkeypatch.setenv("BRIGHTDATA_API_KEY", "none")
    monkeypatch.setenv("BRIGHTDATA_ZONE", "none")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_passes_the_checks(command, tmp_path):
    if "export.sh" in command or "serve.sh" in command:
        assert any("outputs/exported" in call or "FOLDER" in call for call in calls_of(command, tmp_path))
        return
    configs = configs_of(command, tmp_path)
    assert configs, "the script started no trainer and no evaluation"
    for folder, name, arguments in configs:
        if name.endswith("_trainer"):
            dry_run(Path(folder).parent.name, name, *arguments)
        else:
            composed_as_started(folder, name, arguments)


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.there[:60])
def test_an_override_passes_or_is_refused_as_the_page_says(row):
    recipe, name, *groups = CONFIGS[row.section]
    for override in overrides(row.there):
        if row.here.startswith(("refused: ", "refused, ")):
            with pytest.raises((ValueError, AssertionError), match=key_of(override).rpartition(".")[2]):
                dry_run(recipe, name, *groups, override)
        else:
            dry_run(recipe, name, *groups, override)
    for override in overrides(row.here):
        dry_run(recipe, name, *groups, override)
