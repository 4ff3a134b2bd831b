#!/usr/bin/env bash
# ARPO (METHOD=aepo: AEPO, METHOD=grpo: GRPO with tools), reasoning with Qwen2.5-7B-Instruct on 8 GPUs:
#   MODEL_PATH=<cold start> bash recipe/arpo/run_qwen2.5_7b_reasoning.sh [hydra overrides]
# What can be set by environment: recipe/common/run_math.sh. Bing: BRIGHTDATA_API_KEY, BRIGHTDATA_ZONE.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export CONFIG_DIR=recipe/arpo/config METHOD=${METHOD:-arpo} MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-7B-Instruct}
export TRAIN_FILE=${TRAIN_FILE:-outputs/data/arpo/reasoning.parquet} VAL_FILE=${VAL_FILE:-${TEST_FILE:-outputs/data/arpo/valid.parquet}}
export MAX_PROMPT_LENGTH=${MAX_PROMPT_LENGTH:-1536} MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-4096}
export EXPERIMENT_NAME=${EXPERIMENT_NAME:-${METHOD}_qwen2.5_7b_reasoning_seed${SEED:-0}} TENSOR_PARALLEL=${TENSOR_PARALLEL:-1}
exec bash recipe/common/run_math.sh task=reasoning "$@"
