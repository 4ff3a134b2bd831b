#!/usr/bin/env bash
# HAPO for Qwen2.5-Math-7B with LoRA, on one GPU of 80 GB: bash recipe/hapo/run_qwen2.5_math_7b_lora.sh [hydra overrides]
# Shorter answers and smaller batches than in the paper, and a higher learning rate, as LoRA needs one; docs/lora.md.
# What can be set by environment: recipe/common/run_math.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export CONFIG_DIR=recipe/hapo/config METHOD=hapo_math LORA_RANK=${LORA_RANK:-32}
export MODEL_PATH=${MODEL_PATH:-starriver030515/Qwen2.5-Math-7B-32k}
export MAX_POSITION_EMBEDDINGS=${MAX_POSITION_EMBEDDINGS:-32768} MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-4096}
export NNODES=${NNODES:-1} N_GPUS_PER_NODE=${N_GPUS_PER_NODE:-1}
export EXPERIMENT_NAME=${EXPERIMENT_NAME:-hapo_math_7b_lora_seed${SEED:-0}}
exec bash recipe/common/run_math.sh \
    data.train_batch_size=64 \
    reward.reward_kwargs.overlong_buffer_cfg.len=1024 \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    actor_rollout_ref.actor.optim.lr=1e-5 \
    "$@"
