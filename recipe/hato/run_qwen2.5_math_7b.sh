#!/usr/bin/env bash
# HATO for Qwen2.5-Math-7B on mathematics, 8 GPUs: bash recipe/hato/run_qwen2.5_math_7b.sh [hydra overrides]
# What can be set by environment: recipe/common/run_math.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export CONFIG_DIR=recipe/hato/config METHOD=hato_math
export MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-Math-7B}
export MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-3072}
exec bash recipe/common/run_math.sh "$@"
