#!/usr/bin/env bash
# GRPO with lookahead-tree rollouts on Countdown; Qwen2.5-3B on 8 GPUs: bash recipe/latr/grpo-kt-countdown.sh [hydra overrides]
# What can be set by environment: recipe/common/run_countdown.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export CONFIG_DIR=recipe/latr/config METHOD=grpo_countdown HARDWARE=${HARDWARE:-gpu}
export MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-3B}
export EXPERIMENT_NAME=${EXPERIMENT_NAME:-latr_grpo_kt_countdown_seed${SEED:-0}}
exec bash recipe/common/run_countdown.sh "$@"
