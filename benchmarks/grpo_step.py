"""Times a step of GRPO with upstream's trainer and with this repository's, from the same model, data and seeds on CPU.

    python -m benchmarks.grpo_step [--steps 12] [--runs 4]

Upstream's side is `python -m verl.trainer.main_ppo` with upstream's own config: trainer, agent loop, rollout server and
engine are upstream's. Its values for a CPU and for Countdown are those of recipe/common/config/{hardware,task}, which
all sides read. It runs with verl's own log-probabilities, and with those that this repository puts in their place on a
CPU. Our side is `bash recipe/common/run_explore.sh update=tree`. The runs alternate, and the first step of each, which
contains first calls, is left out. Writes benchmarks/results/grpo_step.md.
"""

import math
import os
import shutil
import subprocess
from pathlib import Path

import pandas as pd
import psutil

from benchmarks.report import in_turns, interval, parser_of, with_range, write_report
from recipe.common.reporting.run_metrics import load_metrics

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "outputs" / "grpo_step"
MODEL = ROOT / "outputs" / "warm_start" / "huggingface"
DATA = ROOT / "outputs" / "data" / "countdown"
PHASES = ("gen", "old_log_prob", "adv", "update_actor", "update_weights", "step")
# metrics that show whether both sides do the same work
WORK = {"tokens of the rows": "perf/total_num_tokens", "mean reward": "critic/score/mean"}
SAME = [
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",  # prompts; two updates a step
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    "trainer.save_freq=-1",
]
UPSTREAM = [
    "--config-dir=recipe/common/config",
    "+task=countdown",
    "+hardware=cpu",
    "algorithm.adv_estimator=grpo",
    "trainer.logger=[console,file]",
    f"data.train_files={DATA}/train.parquet",
    f"data.val_files={DATA}/test.parquet",
    f"actor_rollout_ref.model.path={MODEL}",
]
UPSTREAM_SCRIPT = """
source scripts/environment.sh
use_hardware cpu
export VERL_FILE_LOGGER_PATH=$RUN_DIR/metrics.jsonl
exec python scripts/launch.py "$RUN_DIR" -- python -m verl.trainer.main_ppo "$@" trainer.default_local_dir="$RUN_DIR" \
    data.seed="$SEED" actor_rollout_ref.rollout.seed="$SEED" actor_rollout_ref.actor.fsdp_config.seed="$SEED"
"""
UPSTREAM_COMMAND = ["bash", "-c", UPSTREAM_SCRIPT, "upstream", *UPSTREAM]
SIDES = {
    "upstream": ["env", "VERL_USE_EXTERNAL_MODULES=benchmarks.upstream_log_probs", *UPSTREAM_COMMAND],
    "repaired": UPSTREAM_COMMAND,
    "ours": ["bash", "recipe/common/run_explore.sh", "update=tree", "trainer.tree_freq=-1"],
}


def run(side: str, number: int, steps: int, others: list[float]) -> pd.DataFrame:
    """Return the metrics of a new run, one row per step, without the first step. `number` names its folder and is the
    seed; the use of the CPUs by other processes before the run, in percent, is added to `others`."""
    folder = FOLDER / f"{side}_{number}"
    shutil.rmtree(folder, ignore_errors=True)
    others.append(psutil.cpu_percent(interval=5))
    names = {"EXPERIMENT_NAME": folder.name, "RUN_DIR": str(folder), "MODEL_PATH": str(MODEL), "SEED": str(number)}
    command = [*SIDES[side], *SAME, f"trainer.total_training_steps={steps}"]
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "HARDWARE": "cpu", **names})
    return load_metrics(folder).iloc[1:]


def ratio_of(upstream: list[float], ours: list[float]) -> str:
    """Return the geometric mean of the ratios upstream / ours of the pairs of runs, and its 95 % interval, as text."""
    middle, half = interval([math.log(a / b) for a, b in zip(upstream, ours, strict=True)])
    mean, low, high = (math.exp(middle + shift) for shift in (0, -half, half))
    return f"{mean:.2f} ({low:.2f} to {high:.2f})"


def main() -> None:
    args = parser_of(__doc__, steps=12, runs=4).parse_args()
    if not MODEL.exists():
        subprocess.run(["bash", "recipe/common/run_warm_start.sh"], check=True, cwd=ROOT)
    others: list[float] = []
    sides = {side: lambda number, side=side: run(side, number, args.steps, others) for side in SIDES}
    results = in_turns(sides, args.runs)
    table = []
    for phase in PHASES:
        medians = [[metrics[f"timing_s/{phase}"].median() for metrics in runs] for runs in results.values()]
        ratios = [ratio_of(values, medians[-1]) for values in medians[:-1]]
        table.append([phase, *(with_range(values, ".2f") for values in medians), *ratios])
    for label, name in WORK.items():
        means = [[metrics[name].mean() for metrics in runs] for runs in results.values()]
        table.append([label, *(with_range(values, ".3f" if max(values) < 10 else ",.0f") for values in means), "", ""])
    beside = with_range(others, ".0f")
    what = (
        "Seconds of a GRPO step on Countdown: 16 prompts x 8 responses, two updates, the tiny model. A run counts as "
        f"the median of its {args.steps - 1} steps after the first, and a figure is the median of {args.runs} runs "
        "(least to most); the sides take turns, and each turn has its own seed. A ratio is the geometric mean over the "
        "turns, with a 95 % interval (Student's t). In the last two rows a run counts as the mean of the "
        f"same steps. Other processes used {beside} % of the CPUs before a run.\n\n"
        "Upstream's side is verl's own `verl.trainer.main_ppo` and config with the same versions, model, data, batch "
        "sizes and CPU settings. verl and vLLM do not run on a CPU without the parts of this repository that "
        "docs/overlay.md lists for the CPU: the platform, weights that are loaded into a running server, seeded "
        "requests. All sides have these, and the repairs that the same page calls always on. One of them favors "
        "upstream's side: the replay buffer looks for finished responses ten times a second, not every two seconds. "
        "On a CPU verl calls logsumexp once for each token, and this repository once for many, with equal results: "
        "*upstream* is as verl does it, *repaired* is verl with this change alone. Without FlashAttention's kernel the "
        "same loop would run on a GPU; with it there is none.\n\n"
        "Upstream's sides are without what ours gains from: a prompt's responses are requested, scored and "
        "written together (`VERL_SHARED_CALLS`, `group_rollout.py`), the load balancer is not asked for each request, "
        "the shared prompt is computed once and rows without advantages are left out of the update (`update=tree`), "
        "and workers do not fetch columns of Python objects (`send_tensors_only`)."
    )
    header = ["phase", *(f"{side}, s" for side in SIDES), "upstream / ours", "repaired / ours"]
    write_report("grpo_step", what, header, table)


if __name__ == "__main__":
    main()
