#!/usr/bin/env bash
# HAPO for Llama-3.2-3B-Instruct, 4 nodes of 8 GPUs in the paper; no overlong penalty, as in the paper: bash recipe/hapo/run_llama3.2_3b_instruct.sh [hydra overrides]
# What can be set by environment: recipe/common/run_math.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export CONFIG_DIR=recipe/hapo/config METHOD=hapo_math
export MODEL_PATH=${MODEL_PATH:-meta-llama/Llama-3.2-3B-Instruct}
export MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-4096} NNODES=${NNODES:-4}
export SEQUENCE_PARALLEL=${SEQUENCE_PARALLEL:-2}
exec bash recipe/common/run_math.sh reward.reward_kwargs.overlong_buffer_cfg.enable=false "$@"
