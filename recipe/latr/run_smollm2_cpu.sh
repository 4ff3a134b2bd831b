#!/usr/bin/env bash
# LATR with SmolLM2-135M-Instruct on word problems, on a laptop: bash recipe/latr/run_smollm2_cpu.sh [hydra overrides]
# rollout.name=vllm samples the ordinary way, all else equal.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export CONFIG_DIR=recipe/latr/config METHOD=grpo_countdown
export EXPERIMENT_NAME=${EXPERIMENT_NAME:-latr_smollm2_seed${SEED:-0}}
exec bash recipe/common/run_smollm2.sh actor_rollout_ref.actor.use_kl_loss=false "$@"
