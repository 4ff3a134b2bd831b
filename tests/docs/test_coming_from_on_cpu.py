"""docs/coming_from.md is true: commands compose and pass a dry run's checks of the config, and so do overrides, or they
are refused where the page says so. Nothing is started: a shim takes the place of python."""

import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from tests.configs import composed, key_of
from tests.conformance.trees import leaves_of
from tests.docs.test_docs_on_cpu import SHIM, config_of
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
SFT = "pkg://verl.trainer.config,pkg://recipe.common.config.sft"
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
MODULES = list(dict.fromkeys(re.findall(r"`(python -m [^`]+)`", PAGE)))


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


@pytest.fixture
def shims(tmp_path) -> Path:
    """A folder with a python and a vllm that write down their arguments, and data of a cold start."""
    for name in ("python", "vllm"):
        (tmp_path / name).write_text(SHIM)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "train.parquet").touch()
    return tmp_path


def calls_of(command: str, shims: Path) -> list[list[str]]:
    """Return the arguments of each python that the command starts."""
    (shims / "calls").unlink(missing_ok=True)
    environment = {"PATH": f"{shims}:/usr/bin:/bin", "VIRTUAL_ENV": sys.prefix, "DRY_RUN": "1"}
    environment |= {"CALLS": str(shims / "calls"), "BRIGHTDATA_API_KEY": "none", "BRIGHTDATA_ZONE": "none"}
    if "run_sft" in command:
        environment["DATA_DIR"] = str(shims)
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [call.split("\037")[:-1] for call in (shims / "calls").read_text().split("\036")[:-1]]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_passes_the_checks(command, shims):
    calls = calls_of(command, shims)
    if "export.sh" in command or "serve.sh" in command:
        assert any("outputs/exported" in call or "FOLDER" in call for call in calls)
        return
    for folder, name, arguments in filter(None, map(config_of, calls)):
        if name.endswith("_trainer"):
            dry_run(Path(folder).parent.name, name, *arguments)
        else:
            with initialize_config_dir(str(ROOT / folder), version_base=None):
                compose(name, overrides=arguments if name == "evaluate" else [f"hydra.searchpath=[{SFT}]", *arguments])
    assert any(map(config_of, calls)), "the script started no trainer and no evaluation"


SWITCHES = {"adaptive_clip", "adaptive_advantage", "adaptive_temperature", "adv_estimator", "loss_mode"}
SWITCHES |= {"experiment_name", "default_local_dir"}


@pytest.mark.parametrize(
    ("baseline", "own"),
    [
        ("dapo", {"clip_ratio_high": 0.28}),
        ("forking", {"clip_ratio_high": 0.28}),
        ("archer", {"low_entropy_kl_loss_scale_coef": 0.001, "use_kl_loss": True, "kl_loss_coef": 0.0}),
        ("edge", {"clamp": False}),
    ],
)
def test_a_baseline_differs_from_hapo_in_its_parts_alone(baseline, own, shims):
    """By hand: DAPO's clip, Archer's KL, EDGE's own key; model, data, batch, filter and dual clip are HAPO's."""
    values = []
    for command in ("run_qwen3_8b.sh", "run_baseline.sh"):
        calls = calls_of(f"BASELINE={baseline} MODEL=qwen3_8b bash recipe/hapo/{command}", shims)
        ((_, name, arguments),) = filter(None, map(config_of, calls))
        dry_run("hapo", name, *arguments)
        values.append(dict(leaves_of(OmegaConf.to_container(composed(name, *arguments, recipe="hapo")))))
    hapo, other = values
    changed = {key.rpartition(".")[2]: other[key] for key in other if key not in hapo or hapo[key] != other[key]}
    assert {key: value for key, value in changed.items() if key not in SWITCHES} == own
    assert not any(changed[key] for key in SWITCHES if key.startswith("adaptive"))


@pytest.mark.parametrize("command", MODULES)
def test_a_module_has_the_options(command, capsys):
    _, _, module, *words = shlex.split(command)
    with pytest.raises(SystemExit):
        importlib.import_module(module).main(["--help"])
    known = capsys.readouterr().out
    assert [word for word in words if word.startswith("--") and word not in known] == []


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
