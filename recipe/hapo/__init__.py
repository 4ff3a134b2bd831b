"""HAPO (arXiv 2509.16591). Imported by every verl process of a run (VERL_USE_EXTERNAL_MODULES in the recipe's YAML)."""

import importlib

from verl_overlay import after_import

after_import("verl.trainer.ppo.v1", lambda _: importlib.import_module("recipe.hapo.hapo_trainer"))
