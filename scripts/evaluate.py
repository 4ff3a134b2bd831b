"""Evaluates a model on one or more benchmarks; a killed run goes on where it stopped and loses nothing.

    python scripts/evaluate.py experiment=NAME benchmark=math500 [n=8] [step=N] [files=[...]] [server.url=...]
    python scripts/evaluate.py experiment=NAME benchmark=[aime24,gaia] model=FOLDER_OR_HUB_NAME tools=web

Keys: recipe/common/config/evaluate.yaml. Without server.url a vLLM server is started for the model, and stopped.
Samples go to outputs/results/NAME/[step_N/]BENCHMARK.jsonl, a line each; numbers to the .log beside it. DRY_RUN=1
checks model and data, tells the plan and starts nothing. scripts/eval-<benchmark>.sh call it.
"""

import signal
import sys

import hydra
from omegaconf import DictConfig

from verl.evaluation.main import EvaluationError, evaluate


@hydra.main(config_path="../recipe/common/config", config_name="evaluate", version_base=None)
def main(config: DictConfig) -> None:
    # so that the server is stopped then too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        print(*evaluate(config), sep="\n")
    except EvaluationError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
