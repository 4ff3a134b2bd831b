"""The menu names every part that there is, and recipes are made of parts that exist."""

import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from recipe.common.menu import CONFIG, PARTS, about_choice, choices, menu, recipes

ROOT = Path(__file__).resolve().parents[3]


def test_every_choice_is_there_and_described():
    text = menu()
    for part in PARTS:
        for choice, (about, _) in choices(part).items():
            assert len(about.split()) > 1 and f"{part}={choice} " in text and about in text
    assert "needs loss_agg_mode" not in text and "needs actor.loss_agg_mode=token-mean" in text


def test_a_run_put_together_has_every_part_with_a_default_that_exists():
    defaults = OmegaConf.load(CONFIG / "explore.yaml").defaults
    of_part = {name: choice for entry in defaults if OmegaConf.is_dict(entry) for name, choice in entry.items()}
    assert set(PARTS) <= set(of_part)
    assert all(of_part[part] in choices(part) for part in PARTS)


def test_recipes_are_made_of_parts_that_exist():
    made = recipes()
    plain = {"tree": "plain", "environment": "none", "sampler": "plain", "credit": "grpo", "loss": "vanilla"}
    plain |= {"update": "rows", "schedule": "sync"}
    assert made["hapo/hapo_trainer"] == plain | {"sampler": "tempered", "credit": "hapo", "loss": "hapo"}
    assert made["arpo/aepo_trainer"] == plain | {"tree": "aepo", "environment": "tools", "loss": "aepo"}
    for name, parts in made.items():
        assert set(parts) == (set() if name.startswith("common/") else set(PARTS))
        assert all(choice in choices(part) or choice == "kt" for part, choice in parts.items())


def test_a_choice_tells_what_it_sets_and_what_its_keys_mean():
    text = about_choice("tree", "tree_grpo")
    assert "n: 12" in text.replace("'", "") and "step_delimiter: without tools, the text that ends a step." in text
    assert "loss_mode: hapo" in about_choice("loss", "hapo")
    assert "trainer_mode: explore" in about_choice("schedule", "sync")
    for part, choice in (("tree", "oak"), ("forest", "latr")):
        with pytest.raises(ValueError, match="expected one of"):
            about_choice(part, choice)


@pytest.mark.parametrize(("argument", "code"), [("latr", 0), ("nobody", 1)])
def test_the_command_for_a_single_recipe(argument, code):
    command = [sys.executable, "-m", "recipe.common.menu", argument]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == code
    if code:
        assert "no recipe nobody; known: arpo, common, hapo, hato, latr" in done.stderr
    else:
        assert "latr/grpo_countdown_trainer tree=kt" in done.stdout
