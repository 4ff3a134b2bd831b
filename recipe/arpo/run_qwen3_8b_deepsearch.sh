#!/usr/bin/env bash
# ARPO (METHOD=aepo: AEPO, METHOD=grpo: GRPO with tools), deepsearch with Qwen3-8B on 8 GPUs:
#   MODEL_PATH=<cold start> bash recipe/arpo/run_qwen3_8b_deepsearch.sh [hydra overrides]
# What can be set by environment: recipe/common/run_math.sh. Bing: BRIGHTDATA_API_KEY, BRIGHTDATA_ZONE.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export CONFIG_DIR=recipe/arpo/config METHOD=${METHOD:-arpo} MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-8B}
export TRAIN_FILE=${TRAIN_FILE:-outputs/data/arpo/deepsearch.parquet} VAL_FILE=${VAL_FILE:-${TEST_FILE:-outputs/data/arpo/valid.parquet}}
export MAX_PROMPT_LENGTH=${MAX_PROMPT_LENGTH:-2000} MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-6192}
export EXPERIMENT_NAME=${EXPERIMENT_NAME:-${METHOD}_qwen3_8b_deepsearch_seed${SEED:-0}} TENSOR_PARALLEL=${TENSOR_PARALLEL:-1}
exec bash recipe/common/run_math.sh task=deepsearch "$@"
