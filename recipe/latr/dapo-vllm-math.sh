#!/usr/bin/env bash
# DAPO sampled the ordinary way: the baseline of dapo-kt, all else equal, on mathematics; Qwen2.5-3B on 8 GPUs: bash recipe/latr/dapo-vllm-math.sh [hydra overrides]
# What can be set by environment: recipe/common/run_math.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export CONFIG_DIR=recipe/latr/config METHOD=dapo_math
export MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-3B} MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-4096}
export EXPERIMENT_NAME=${EXPERIMENT_NAME:-latr_dapo_vllm_math_seed${SEED:-0}}
exec bash recipe/common/run_math.sh actor_rollout_ref.rollout.name=vllm "$@"
