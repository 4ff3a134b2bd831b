"""What runs with components register, in every verl process (VERL_USE_EXTERNAL_MODULES in the recipes' YAML)."""

import importlib

from verl_overlay import after_import

after_import("verl.trainer.ppo.v1", lambda _: importlib.import_module("recipe.common.explore_trainer"))
