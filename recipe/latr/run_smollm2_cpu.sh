#!/usr/bin/env bash
# LATR with SmolLM2-135M-Instruct on word problems, on a laptop: bash recipe/latr/run_smollm2_cpu.sh [hydra overrides]
# rollout.name=vllm samples the ordinary way, all else equal. Responses have at most 64 tokens, so that branches are compared
# earlier than in the paper; with these thresholds 7 of 8 branches open at the start of training.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export CONFIG_DIR=recipe/latr/config METHOD=grpo_countdown
export EXPERIMENT_NAME=${EXPERIMENT_NAME:-latr_smollm2_seed${SEED:-0}}
exec bash recipe/common/run_smollm2.sh \
    actor_rollout_ref.actor.use_kl_loss=false \
    "actor_rollout_ref.rollout.kt.rollout_filter_steps=[10,20,40]" \
    actor_rollout_ref.rollout.kt.prob_filter_abs_thres=0.15 \
    actor_rollout_ref.rollout.kt.prob_filter_rel_thres=0.3 \
    "$@"
