"""LATR (arXiv 2510.24302): lookahead-tree rollouts, rollout name `kt`.

Imported by every verl process of a run (VERL_USE_EXTERNAL_MODULES in the recipe's YAML).
"""

import importlib

from verl_overlay import after_import

after_import("verl.trainer.ppo.v1", lambda _: importlib.import_module("recipe.latr.latr_trainer"))
