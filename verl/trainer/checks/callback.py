"""The Hydra callback that checks a run before Ray starts (`hydra.callbacks.preflight` in the recipes' YAML).

It runs in the driver, after the config has been composed and before upstream's `main` gets it.
"""

import os
import sys
import traceback
import warnings

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from verl.trainer.checks.parts import check_environment, part_warnings
from verl.trainer.checks.preflight import check_run
from verl.trainer.checks.prompts import turn_end_warning
from verl.trainer.checks.resources.cluster import carry_environment, check_own_machine, check_ray_resources
from verl.trainer.checks.run_dir import lock_run_dir, prepare_run_dir
from verl.trainer.checks.run_plan import describe_plan
from verl.trainer.checks.settle import settle
from verl.trainer.checks.values import check_root_keys
from verl.trainer.watches import RunWatch
from verl.utils.fault_reports import RunError

REFUSED = 2  # exit code


class Preflight(Callback):
    """Callback that settles and checks the config, activates the CPU platform if the config asks for it, prepares the
    run's folder, and starts the driver's watch. With DRY_RUN=1 it prints the run's plan after the checks, and ends the
    command."""

    def on_run_start(self, config: DictConfig, **kwargs) -> None:
        warnings.filterwarnings("ignore", message=r"\w+ engine is not available")  # upstream's, of each one missing
        try:
            check_root_keys(config)
            settle(config)
            check_run(config)
            for warning in filter(None, (*part_warnings(config), turn_end_warning(config))):
                print(f"warning: {warning}")
            dry_run = os.environ.get("DRY_RUN", "0") not in ("", "0")
            check_ray_resources(config, starting=not dry_run)
            if dry_run:
                print(describe_plan(config))
                print("dry run: the config and the files are fine, nothing was started")
                raise SystemExit(0)
            check_own_machine(config)
            lock_run_dir(config)
            check_environment(config)
            prepare_run_dir(config)
            carry_environment(config)
            RunWatch().start()
        except (ValueError, RunError) as error:
            if os.environ.get("HYDRA_FULL_ERROR") == "1":
                traceback.print_exc()
            print(f"error: {error}", file=sys.stderr)
            raise SystemExit(REFUSED) from None
        # Hydra turns a callback's exceptions into warnings and continues, except for SystemExit
        except Exception as error:
            traceback.print_exc()
            raise SystemExit(f"error: the checks before the run failed: {error!r}") from error
