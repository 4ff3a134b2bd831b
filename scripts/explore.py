"""Compares every tree policy with plain sampling, for a model on a task, before any training.

    python scripts/explore.py MODEL DATA [hydra overrides]

MODEL is a folder or a name on the Hugging Face hub, DATA a parquet file in verl's format. One vLLM engine is started,
and stopped at the end. The keys are in recipe/common/config/diagnosis.yaml; scripts/explore.sh calls this.
"""

import os
import shlex
import signal
import sys
from pathlib import Path

import pyarrow.parquet as pq
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

import verl.trainer
from recipe.common.menu import CONFIG, RECIPES
from recipe.common.reporting.exploration_report import proposals, table, warnings, write
from verl.evaluation.exploration.plan import ExplorationPlan, exploration_plan
from verl.utils.data_files import write_mixed
from verl.utils.parts import load_choices, parts

# folder names that every checkpoint has, so that they do not tell checkpoints apart
UNTELLING = ("huggingface", "actor", "merged")


def config_of(model: str, data: str, overrides: list[str]) -> DictConfig:
    """Return the config. If the data's data_source names a task, the config selects this task. On a CPU, it also sets
    the task's `cpu_lengths`. Overrides take precedence."""
    folders = [Path(verl.trainer.__path__[0], "config"), *sorted(RECIPES.glob("*/config"))]
    source, hardware = data_source(data), os.environ.get("HARDWARE", "cpu")
    chosen = ["hydra.searchpath=[" + ",".join(f"'file://{folder}'" for folder in folders) + "]"]
    texts = {"experiment": model_name(model), "actor_rollout_ref.model.path": model}
    texts |= {"data.train_files": data, "data.val_files": data}
    # quoted, as Hydra reads 500 as a number, and a comma as the end
    chosen += [f"hardware={hardware}", *(f"{key}='{text}'" for key, text in texts.items())]
    if (task := parts("task").get(source)) is not None:
        chosen.append(f"task={source}")
        if hardware == "cpu" and task.cpu_lengths is not None:
            prompt, response = task.cpu_lengths
            chosen += [f"data.max_prompt_length={prompt}", f"data.max_response_length={response}"]
    load_choices()
    with initialize_config_dir(str(CONFIG), version_base=None):
        return compose("diagnosis", [*chosen, *overrides])


def data_source(data: str) -> str | None:
    """Return the first row's data_source; None if there is none (the checks of the plan then report the problem)."""
    if not Path(data).is_file() or "data_source" not in pq.read_schema(data).names:
        return None
    return next(iter(pq.read_table(data, columns=["data_source"])["data_source"].to_pylist()), None)


def model_name(model: str) -> str:
    """Return a short name for a model.

    >>> model_name("outputs/grpo_seed0/global_step_40/actor/huggingface"), model_name("Qwen/Qwen2.5-3B")
    ('grpo_seed0_global_step_40', 'Qwen2.5-3B')
    """
    telling = [part for part in Path(model).parts if part not in UNTELLING]
    return "_".join(telling[-2:] if telling[-1].startswith("global_step_") else telling[-1:])


def main(model: str, data: str, *overrides: str) -> None:
    try:
        config = config_of(model, data, list(overrides))
        plan: ExplorationPlan = exploration_plan(config)
    except (ValueError, HydraException, OmegaConfBaseException) as error:
        sys.exit(f"error: {error}")
    command = shlex.join(["bash", "scripts/explore.sh", model, data, *overrides])
    about = [f"command: {command}", *plan.describe()]
    print(*about, sep="\n", flush=True)
    if os.environ.get("DRY_RUN", "0") not in ("", "0"):
        print("dry run: config, model and data are fine, nothing was started")
        return
    # SIGTERM raises an exception, so that the engine is stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    from verl.evaluation.exploration.run import run  # a slow import, which a dry run does not need

    result = run(plan)
    name = f"explore_{Path(data).parent.name}_{Path(data).stem}_seed{config.seed}"
    files = write(result, about, config.n, Path(config.output_dir, config.experiment, name))
    print(table(result["rows"], config.n), *warnings(result["rows"]), *proposals(result), sep="\n")
    if config.write is not None:
        print(write_mixed(config.data.val_files, config.write, dict(result["solve_rates"])))
    print(f"written: {', '.join(map(str, files))}")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
