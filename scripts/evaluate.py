"""Evaluates a model on one or more benchmarks. If a run is killed, the same command continues it without loss.

    python scripts/evaluate.py experiment=NAME benchmark=math500 [n=8] [step=N] [files=[...]] [server.url=...]
    python scripts/evaluate.py experiment=NAME benchmark=[aime24,gaia] model=FOLDER_OR_HUB_NAME tools=web

The keys are in recipe/common/config/evaluate.yaml. Without server.url it starts a vLLM server for the model and stops
it at the end. Each sample is a line of outputs/results/NAME/[step_N/]BENCHMARK.jsonl; the .log beside it holds the
numbers. DRY_RUN=1 checks model and data, prints the plan and starts nothing. scripts/eval-<benchmark>.sh call it.
"""

import signal
import sys

import hydra
from omegaconf import DictConfig

from verl.evaluation.main import EvaluationError, evaluate


@hydra.main(config_path="../recipe/common/config", config_name="evaluate", version_base=None)
def main(config: DictConfig) -> None:
    # SIGTERM raises an exception, so that the server is stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        print(*evaluate(config), sep="\n")
    except EvaluationError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
