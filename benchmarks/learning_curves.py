"""Does it learn? Held-out accuracy of the baselines on Countdown before and after RL, over seeds.

    python benchmarks/learning_curves.py [--runs grpo=0,1,2 dapo=0,1,2] [--steps 120]

Runs recipe/common/run_<method>_countdown.sh once per method and seed (15 minutes each on two cores) from the same warm
start, and reads mean@8 from the trainer's validation. Baseline: the warm start, measured in the same run at step 0.
Writes benchmarks/results/learning_curves.md and .png. A run that exists is not repeated.
"""

import argparse
import os
import statistics
import subprocess
from pathlib import Path

from benchmarks.report import RESULTS, write_report
from recipe.common.run_metrics import load_metrics, plot_runs

ROOT = Path(__file__).resolve().parent.parent
ACCURACY = "val-core/countdown/acc/mean@8"


def run(method: str, seed: int, steps: int) -> Path:
    """One training run; its folder."""
    experiment = f"learning_{method}_seed{seed}"
    folder = ROOT / "outputs" / experiment
    if not (folder / f"global_step_{steps}" / "COMPLETE").exists():
        env = {**os.environ, "HARDWARE": "cpu", "SEED": str(seed), "EXPERIMENT_NAME": experiment}
        overrides = [f"trainer.total_training_steps={steps}", "trainer.test_freq=40", f"trainer.save_freq={steps}"]
        subprocess.run(["bash", f"recipe/common/run_{method}_countdown.sh", *overrides], check=True, cwd=ROOT, env=env)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", default=["grpo=0,1,2", "dapo=0,1,2"], metavar="METHOD=SEEDS")
    parser.add_argument("--steps", type=int, default=120)
    args = parser.parse_args()
    rows, curves = [], {}
    for method, seeds in (one.split("=") for one in args.runs):
        gains = []
        for seed in map(int, seeds.split(",")):
            metrics = load_metrics(run(method, seed, args.steps))
            curves[f"{method} seed {seed}"] = metrics
            accuracy = metrics[ACCURACY].dropna()
            before, after = accuracy.iloc[0], accuracy.iloc[-1]
            minutes = (metrics["timing_s/step"].sum() + metrics["timing_s/testing"].sum()) / 60
            gains.append(after - before)
            rows.append(
                (method, str(seed), f"{before:.3f}", f"{after:.3f}", f"{after - before:+.3f}", f"{minutes:.1f}")
            )
        rows.append((method, f"mean of {len(gains)}", "", "", f"{statistics.mean(gains):+.3f}", ""))
    plot_runs(curves, RESULTS / "learning_curves.png")
    write_report(
        "learning_curves",
        f"Countdown, {args.steps} steps of 16 prompts x 8; accuracy is the trainer's mean@8 on 64 held-out problems at "
        "temperature 1. Minutes are steps and validation, without start-up.",
        ("method", "seed", "warm start", "after RL", "gain", "minutes"),
        rows,
    )


if __name__ == "__main__":
    main()
