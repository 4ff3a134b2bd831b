#!/usr/bin/env bash
# HAPO for Qwen3-8B-Base, 8 nodes of 8 GPUs in the paper: bash recipe/hapo/run_qwen3_8b.sh [hydra overrides]
# What can be set by environment: recipe/common/run_math.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export CONFIG_DIR=recipe/hapo/config METHOD=hapo_math
export MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-8B-Base}
export MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-12288} NNODES=${NNODES:-8}
export SEQUENCE_PARALLEL=${SEQUENCE_PARALLEL:-8}
exec bash recipe/common/run_math.sh "$@"
