#!/usr/bin/env bash
# GRPO with lookahead-tree rollouts on mathematics; Qwen2.5-3B on 8 GPUs: bash recipe/latr/grpo-kt-math.sh [hydra overrides]
# What can be set by environment: recipe/common/run_math.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export CONFIG_DIR=recipe/latr/config METHOD=grpo_math
export MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-3B} MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-4096}
export EXPERIMENT_NAME=${EXPERIMENT_NAME:-latr_grpo_kt_math_seed${SEED:-0}}
exec bash recipe/common/run_math.sh "$@"
