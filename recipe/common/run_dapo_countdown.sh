#!/usr/bin/env bash
# DAPO on Countdown, upstream's trainer and loss: the baseline that the recipes are compared with.
#   HARDWARE=cpu|gpu  SEED=0  EXPERIMENT_NAME=...  MODEL_PATH=...   bash recipe/common/run_dapo_countdown.sh [hydra overrides]
# The same command resumes a run that was interrupted. Results: outputs/$EXPERIMENT_NAME
METHOD=dapo exec bash "$(dirname "${BASH_SOURCE[0]}")/run_countdown.sh" "$@"
