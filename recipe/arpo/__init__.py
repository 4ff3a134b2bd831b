"""ARPO (arXiv 2507.19849) and AEPO (arXiv 2510.14545): tool-use rollouts that fork where the model is uncertain.

Imported by every verl process of a run (VERL_USE_EXTERNAL_MODULES in the recipe's YAML).
"""

import importlib

from verl_overlay import after_import

after_import("verl.trainer.ppo.v1", lambda _: importlib.import_module("recipe.arpo.arpo_trainer"))
