#!/usr/bin/env bash
# GRPO with lookahead-tree rollouts on mathematics, for Qwen2.5-7B with LoRA, on one GPU of 80 GB: bash recipe/latr/grpo-kt-math-7b-lora.sh [hydra overrides]
# The model without its adapter is the reference policy. Batches are smaller than in the paper, and the learning rate is
# higher, as LoRA needs one; docs/lora.md. What can be set by environment: recipe/common/run_math.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export CONFIG_DIR=recipe/latr/config METHOD=grpo_math LORA_RANK=${LORA_RANK:-32}
export MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-7B} MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-4096}
export NNODES=${NNODES:-1} N_GPUS_PER_NODE=${N_GPUS_PER_NODE:-1}
export EXPERIMENT_NAME=${EXPERIMENT_NAME:-latr_grpo_kt_math_7b_lora_seed${SEED:-0}}
exec bash recipe/common/run_math.sh \
    update=tree \
    data.train_batch_size=64 \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    actor_rollout_ref.actor.optim.lr=1e-5 \
    actor_rollout_ref.actor.fsdp_config.param_offload=true \
    "$@"
