#!/usr/bin/env bash
# HAPO for Qwen2.5-Math-1.5B with the authors' context of 32,768 positions (Qwen's own has 4,096), 4 nodes of 8 GPUs in the paper: bash recipe/hapo/run_qwen2.5_math_1.5b.sh [hydra overrides]
# What can be set by environment: recipe/common/run_math.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export CONFIG_DIR=recipe/hapo/config METHOD=hapo_math
export MODEL_PATH=${MODEL_PATH:-starriver030515/Qwen2.5-Math-1.5B-16k}
export MAX_POSITION_EMBEDDINGS=${MAX_POSITION_EMBEDDINGS:-32768}
export MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-10240} NNODES=${NNODES:-4}
export SEQUENCE_PARALLEL=${SEQUENCE_PARALLEL:-2}
exec bash recipe/common/run_math.sh "$@"
