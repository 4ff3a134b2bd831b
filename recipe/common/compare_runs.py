"""The runs of a comparison: the methods and their commands, a training run, its curve, and many runs side by side.

Tokens are those that the server generated, dropped ones included; seconds cover generation, update and all between,
without validation and start-up. A tool call that trajectories share counts once.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import numpy as np
import pandas as pd
from tqdm import tqdm

from recipe.common.reporting.run_metrics import generated_tokens, load_metrics, validation_accuracy
from verl.utils.atomic_files import replacing
from verl.utils.parts import parts

ROOT = Path(__file__).resolve().parents[2]
T, R = TypeVar("T"), TypeVar("R")
RUNNING: set[subprocess.Popen] = set()
KT = "actor_rollout_ref.rollout.kt"
# script of the small tasks for methods that do not name one
EXPLORE = ["recipe/common/run_explore.sh", "update=tree"]
# the paper's: share of the run -> share of responses that come from trees from then on
LATR_SCHEDULE = {0.0: 1.0, 0.02: 0.75, 0.04: 0.5, 0.16: 0.25, 0.4: 0.0}
# DAPO's dynamic sampling: groups whose answers are all right or all wrong are replaced
FILTERED = [
    "algorithm.filter_groups.enable=true",
    "algorithm.filter_groups.metric=acc",
    "algorithm.filter_groups.max_inflight_gen_batches=2",
]
CLIP_HIGHER = ["actor_rollout_ref.actor.clip_ratio_high=0.28", "actor_rollout_ref.actor.clip_ratio_c=10.0"]
METHODS = {
    "grpo": ["credit=grpo"],
    "grpo-n4": ["credit=grpo", "actor_rollout_ref.rollout.n=4"],
    "band": ["credit=grpo", "data.sampler.band=0.1:0.9"],
    "dapo": [*FILTERED, *CLIP_HIGHER],
    "grpo-filtered": [*FILTERED],
    "tree_gain": ["tree=plain", "credit=tree_gain"],
    # `command_of` adds the paper's schedule, scaled to the run's length
    "latr": ["recipe/latr/run_countdown_cpu.sh"],
    # Identical steps are merged, so a tree has fewer leaves than n: about half as many tokens as 8 responses.
    "hato": ["recipe/hato/run_countdown_cpu.sh", "actor_rollout_ref.rollout.n=16"],
    "hapo": ["recipe/hapo/run_countdown_cpu.sh"],
    "arpo": ["recipe/arpo/run_search_task_cpu.sh"],
    "aepo": ["recipe/arpo/run_search_task_cpu.sh"],
    "eptree": ["tree=eptree", "credit=treerl", "actor_rollout_ref.rollout.n=8"]
    + [f"actor_rollout_ref.rollout.custom.eptree.{key}" for key in ("M=2", "N=3", "L=1", "T=1")],
}


def scripts() -> dict[str, list[str]]:
    """Return task -> script and overrides of the methods that do not name a script."""
    tasks = parts("task").values()
    return {task.name: [*task.script] or EXPLORE for task in tasks if task.script or task.is_small}


def overrides_of(method: str, task: str = "walk") -> list[str]:
    """Return a method's overrides: the text after `NAME:`; or the entry of METHODS, which may begin with a script, if
    that trains on this task; or the registered tree, sampler, credit and loss of this name.

    Raises:
        ValueError: there is no method of this name.
    """
    name, colon, overrides = method.partition(":")
    if colon:
        return shlex.split(overrides)
    entry = METHODS.get(name)
    if entry and (parts("task")[task].is_small or not entry[0].endswith("run_countdown_cpu.sh")):
        return entry
    named = [f"{kind}={name}" for kind in ("tree", "sampler", "credit", "loss") if name in parts(kind)]
    if not named:
        raise ValueError(
            f"there is no method {name}: choose one of {', '.join(METHODS)}; a tree, sampler, credit or loss of "
            'python -m recipe.common.menu; or write "name: hydra overrides"'
        )
    return named


def command_of(method: str, steps: int, task: str = "walk") -> list[str]:
    """Return a script and overrides: the method's own script, or else the task's."""
    command = overrides_of(method, task)
    if not command[:1] or not command[0].endswith(".sh"):
        command = [*scripts()[task], *command]
    if method != "latr":
        return command
    shares = ", ".join(f"{round(begun * steps)}: {share}" for begun, share in LATR_SCHEDULE.items())
    # LATR's own script has a schedule, and the tree alone has none
    replaced = [f"~{KT}.mix_ratio_schedule"] if command == METHODS["latr"] else []
    return [*command, *replaced, f"+{KT}.mix_ratio_schedule={{{shares}}}"]


def environment_of(method: str, task: str) -> dict[str, str]:
    """Return what a run script reads; METHOD is for the search task's script, which has several methods."""
    return {"HARDWARE": "cpu", "TASK": task, "METHOD": method if method in ("arpo", "aepo") else "grpo"}


def inherited() -> dict[str, str]:
    """Return what run scripts read of this process's environment variables."""
    names = ("HOPS", "ENVIRONMENT", "MODEL_PATH", "DATA_DIR", "LORA_RANK")
    return {name: os.environ[name] for name in names if os.environ.get(name)}


def keep_design(path: Path, design: Mapping) -> None:
    """Write the design to a file; raise ValueError if the file has another one."""
    if path.exists() and (before := json.loads(path.read_text())) != design:
        changed = ", ".join(key for key in {**before, **design} if before.get(key) != design.get(key))
        raise ValueError(f"{path} has another design ({changed} differ): choose another --name (NAME=...)")
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(design, indent=1) + "\n")


def trained(
    experiment: str, command: list[str], environment: Mapping[str, str], is_complete: Callable[[pd.DataFrame], bool]
) -> pd.DataFrame:
    """Return the curve of a training run, which is started if outputs/ does not have it. Print a warning if one of its
    validations lost prompts, whose groups failed: its accuracy is that of the others.

    Args:
        command: a run script, and overrides.
        environment: environment variables for the script.
        is_complete: whether a curve reaches the run's end. Runs write no checkpoints: one that does not begins anew.

    Raises:
        RuntimeError: the run failed, or ended before its last validation; the message names the log.
        ValueError: outputs/ has a run of this name with another command or environment.
    """
    folder = ROOT / "outputs" / experiment
    keep_design(folder / "comparison.json", {"command": command, **environment, **inherited()})

    def complete_curve() -> pd.DataFrame | None:
        metrics = load_metrics(folder)
        if not is_complete(curve := curve_of(metrics)):
            return None
        if "val-aux/failed_prompts" in metrics:
            lost = f"its validations lost {metrics['val-aux/failed_prompts'].sum():.0f} prompts"
            print(f"warning: {experiment}: {lost}: train.log says why", file=sys.stderr)
        return curve

    with suppress(FileNotFoundError, ValueError, KeyError):
        if (curve := complete_curve()) is not None:
            return curve
    env = {**os.environ, **environment, "EXPERIMENT_NAME": experiment}
    with open(log_file := folder / "script.log", "a") as log:
        options = {"cwd": ROOT, "env": env, "stdout": log, "stderr": log, "start_new_session": True}
        process = subprocess.Popen(["bash", *command, "trainer.save_freq=-1"], **options)
        RUNNING.add(process)
        code = process.wait()
        RUNNING.discard(process)
    if code or (curve := complete_curve()) is None:
        raise RuntimeError(f"{experiment} failed, or ended before its last validation: {log_file} says why")
    return curve


def curve_of(metrics: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each validation: its accuracy, and the steps, tokens, seconds and calls until then."""
    (accuracy,) = validation_accuracy(metrics).values()
    calls = metrics.get("tree/tool_calls", 0) * metrics["tree/prompts"]
    spent = {"tokens": generated_tokens(metrics), "seconds": metrics["timing_s/step"], "calls": calls}
    sums = {name: values.fillna(0).cumsum()[accuracy.index] for name, values in spent.items()}
    return pd.DataFrame({"accuracy": accuracy, "steps": accuracy.index, **sums})


def area(curve: pd.DataFrame, axis: str, end: float) -> float:
    """Return the mean accuracy from 0 to `end` of an axis: on straight lines between validations, flat after the last.

    >>> area(pd.DataFrame({"accuracy": [0.0, 0.4], "tokens": [0, 400]}), "tokens", 200)
    0.1
    """
    inside = curve[curve[axis] < end]
    places = [*inside[axis], end]
    accuracies = [*inside["accuracy"], np.interp(end, curve[axis], curve["accuracy"])]
    return float(np.trapezoid(accuracies, places) / end)


def in_parallel(tasks: Sequence[T], work: Callable[[T], R], jobs: int, report: Callable[[R], None]) -> None:
    """Call `report(work(task))` for each task, `jobs` at a time, as they end.

    If one fails, tasks that have not begun are canceled. SIGTERM, SIGHUP and Ctrl-C also end the runs that have begun.
    """
    # nohup lets a process ignore SIGHUP
    signals = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) != signal.SIG_IGN]

    def end(number, frame):
        for each in signals:
            signal.signal(each, signal.SIG_IGN)  # a second signal would interrupt the end of the runs
        sys.exit(128 + number)

    for each in signals:
        signal.signal(each, end)
    with ThreadPoolExecutor(jobs) as pool, tqdm(total=len(tasks), unit="run", disable=not tasks) as bar:
        try:
            for done in as_completed([pool.submit(work, task) for task in tasks]):
                report(done.result())
                bar.update()
        except BaseException as error:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in [] if isinstance(error, Exception) else list(RUNNING):
                with suppress(ProcessLookupError):  # launchers, which end all that they have started
                    os.killpg(process.pid, signal.SIGTERM)
            raise
