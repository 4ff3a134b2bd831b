"""The configs that a command of the documentation composes: a shim takes the place of python."""

import subprocess
import sys
from pathlib import Path

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

import verl.trainer
from verl.utils.parts import load_choices

ROOT = Path(__file__).resolve().parents[2]
SHIM = """#!/bin/sh
# stands for python: writes down what it was called with
{ printf '%s\\037' "$@"; printf '\\036'; } >>"$CALLS"
"""


def calls_of(command: str, folder: Path) -> list[list[str]]:
    """Return the arguments of each python and vllm that the command starts; the shims are put into the folder."""
    for name in ("python", "vllm"):
        (folder / name).write_text(SHIM)
        (folder / name).chmod(0o755)
    (folder / "train.parquet").touch()  # data of a cold start
    environment = {"PATH": f"{folder}:/usr/bin:/bin", "VIRTUAL_ENV": sys.prefix, "DRY_RUN": "1"}
    environment |= {"CALLS": str(folder / "calls"), "BRIGHTDATA_API_KEY": "none", "BRIGHTDATA_ZONE": "none"}
    if "run_sft" in command:
        environment["DATA_DIR"] = str(folder)
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [call.split("\037")[:-1] for call in (folder / "calls").read_text().split("\036")[:-1]]


def configs_of(command: str, folder: Path) -> list[tuple[str, str, list[str]]]:
    """Return config folder, config name and overrides of each call that composes a config."""
    configs = []
    for call in calls_of(command, folder):
        trainer = next((name for name in ("verl.trainer.main_ppo", "verl.trainer.sft_trainer") if name in call), None)
        if call[0] == "scripts/evaluate.py":
            configs.append(("recipe/common/config", "evaluate", call[1:]))
        elif call[0] == "scripts/explore.py":
            configs.append(("recipe/common/config", "diagnosis", call[3:]))
        elif trainer:
            words = [word for word in call if word not in ("--cfg", "job", "--resolve")]  # the SFT's dry run has these
            _, config_folder, _, name, *overrides = words[words.index(trainer) + 1 :]
            configs.append((config_folder, name, overrides))
    return configs


def composed_as_started(folder: str, name: str, overrides: list[str]) -> DictConfig:
    """Return a config with the search path that its program adds."""
    ours = "pkg://recipe.common.config" + (".sft" if "sft" in f"{folder} {name}" else "")
    if name in ("diagnosis", "explore"):  # these take the recipes' own choices
        recipes = sorted({path.parents[1].name for path in ROOT.glob("recipe/*/config/*.yaml")} - {"common"})
        ours += "".join(f",pkg://recipe.{recipe}.config" for recipe in recipes)
    upstream = Path(verl.trainer.__path__[0]) / "config"
    # an evaluation's config stands alone: a group of upstream's would hide its keys
    search = [f"hydra.searchpath=[file://{upstream},{ours}]"] if name != "evaluate" else []
    load_choices()
    with initialize_config_dir(str(ROOT / folder), version_base=None):
        return compose(name, overrides=[*search, *overrides])
