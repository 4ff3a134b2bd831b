"""Where the time of a run goes on CPU: from launch to the first step, and within a step.

    python benchmarks/run_time.py [--repeats 3] [--steps 10]

Runs recipe/common/run_grpo_countdown.sh, alternating between the profile and the baseline: the same with upstream's
process layout for vLLM (`distributed_executor_backend=mp`: engine and worker in two processes). Start-up is read off
the log's time stamps. Writes benchmarks/results/run_time.md.
"""

import argparse
import os
import re
import shutil
import statistics
import subprocess
import time
from datetime import datetime
from pathlib import Path

from benchmarks.report import write_report
from recipe.common.run_metrics import load_metrics, phase_seconds

ROOT = Path(__file__).resolve().parent.parent
VARIANTS = {
    "upstream's layout": "actor_rollout_ref.rollout.engine_kwargs.vllm.distributed_executor_backend=mp",
    "profile": "actor_rollout_ref.rollout.engine_kwargs.vllm.distributed_executor_backend=uni",
}
# a line of the log that ends each part of the start-up
MILESTONES = {
    "driver: imports, checks, Ray": "Started a local Ray instance",
    "TaskRunner, TransferQueue, data": "train and validate dataloader initialized",
    "FSDP worker": "actor and ref model engine initialized",
    "reward loop, vLLM server and engine": "checkpoint engine manager initialized",
}
LAST_PART = "weight sync, agent loop, first step"


def start_up_parts(log: Path, launched: datetime, first_step: datetime) -> dict[str, float]:
    """Seconds of each part of the start-up."""
    parts, before = {}, launched
    lines = log.read_text(errors="replace").splitlines()
    for part, milestone in MILESTONES.items():
        stamp = next(re.search(r"(\d\d:\d\d:\d\d)[,.](\d+)", line) for line in lines if milestone in line)
        at = datetime.combine(launched.date(), datetime.strptime(stamp[1], "%H:%M:%S").time())
        parts[part] = (at - before).total_seconds()
        before = at
    parts[LAST_PART] = (first_step - before).total_seconds()
    parts["total"] = (first_step - launched).total_seconds()
    return parts


def run(name: str, variant: str, steps: int) -> dict[str, float]:
    """One run: seconds of each part of its start-up and of each phase of a step."""
    folder = ROOT / "outputs" / f"run_time_{name}"
    shutil.rmtree(folder, ignore_errors=True)
    env = {**os.environ, "HARDWARE": "cpu", "EXPERIMENT_NAME": folder.name}
    overrides = [f"trainer.total_training_steps={steps}", "trainer.test_freq=-1", "trainer.save_freq=-1"]
    command = ["bash", "recipe/common/run_grpo_countdown.sh", *overrides, "trainer.val_before_train=false", variant]
    launched, metrics = datetime.now().replace(microsecond=0), folder / "metrics.jsonl"
    process = subprocess.Popen(command, cwd=ROOT, env=env)
    while not (metrics.exists() and metrics.read_text().count("\n")):
        if process.poll() is not None:
            raise SystemExit(f"error: {' '.join(command)} failed")
        time.sleep(0.2)
    first_step = datetime.now()
    if process.wait():
        raise SystemExit(f"error: {' '.join(command)} failed")
    table = load_metrics(folder)
    step = {f"step: {phase}": seconds for phase, seconds in phase_seconds(table).items()}
    step["step: total"] = table["timing_s/step"].iloc[2:].median()
    return start_up_parts(folder / "train.log", launched, first_step) | step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    measured = {name: [] for name in VARIANTS}
    for repeat in range(args.repeats):
        for name, override in VARIANTS.items():
            measured[name].append(run(f"{list(VARIANTS).index(name)}_{repeat}", override, args.steps))
    baseline, ours = measured.values()
    rows = []
    for part in ours[0]:
        values = [statistics.median(one[part] for one in runs) for runs in (baseline, ours)]
        rows.append((part, *(f"{value:.1f}" for value in values), f"{values[1] / values[0]:.2f}"))
    write_report(
        "run_time",
        f"GRPO on Countdown, 16 prompts x 8, {args.steps} steps; seconds, median of {args.repeats} alternating runs. "
        "Start-up is from the command to the end of the first step.",
        ("part", *VARIANTS, "ratio"),
        rows,
    )


if __name__ == "__main__":
    main()
