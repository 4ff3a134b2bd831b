#!/usr/bin/env bash
# HATO with the design notes' own values for Qwen2.5-Math-7B, 8 GPUs: bash recipe/hato/run_notes_qwen2.5_math_7b.sh [hydra overrides]
# The notes do not say where a step ends, nor how many leaves a tree has: as in run_qwen2.5_math_7b.sh.
# What can be set by environment: recipe/common/run_math.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export CONFIG_DIR=recipe/hato/config METHOD=hato_notes
export MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-Math-7B}
export MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-3072} TENSOR_PARALLEL=${TENSOR_PARALLEL:-1}
exec bash recipe/common/run_math.sh task=math \
    data.train_batch_size=8 \
    actor_rollout_ref.actor.ppo_mini_batch_size=8 \
    actor_rollout_ref.rollout.n=16 \
    hato.tree.max_step_tokens=512 \
    "$@"
