#!/usr/bin/env bash
# GRPO sampled the ordinary way: the baseline of grpo-kt, all else equal, on Countdown; Qwen2.5-3B on 8 GPUs: bash recipe/latr/grpo-vllm-countdown.sh [hydra overrides]
# What can be set by environment: recipe/common/run_countdown.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export CONFIG_DIR=recipe/latr/config METHOD=grpo_countdown HARDWARE=${HARDWARE:-gpu}
export MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-3B}
export EXPERIMENT_NAME=${EXPERIMENT_NAME:-latr_grpo_vllm_countdown_seed${SEED:-0}}
exec bash recipe/common/run_countdown.sh actor_rollout_ref.rollout.name=vllm "$@"
