#!/usr/bin/env bash
# ARPO (METHOD=aepo: AEPO, METHOD=grpo: GRPO with tools), deepsearch with Qwen3-14B on 8 GPUs:
#   MODEL_PATH=<cold start> bash recipe/arpo/run_qwen3_14b_deepsearch.sh [hydra overrides]
# What can be set by environment: recipe/common/run_math.sh. Bing: BRIGHTDATA_API_KEY, BRIGHTDATA_ZONE.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export CONFIG_DIR=recipe/arpo/config METHOD=${METHOD:-arpo} MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-14B}
export TRAIN_FILE=${TRAIN_FILE:-outputs/data/arpo/deepsearch.parquet} VAL_FILE=${VAL_FILE:-${TEST_FILE:-outputs/data/arpo/valid.parquet}}
export MAX_PROMPT_LENGTH=${MAX_PROMPT_LENGTH:-2000} MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-6192}
export EXPERIMENT_NAME=${EXPERIMENT_NAME:-${METHOD}_qwen3_14b_deepsearch_seed${SEED:-0}} TENSOR_PARALLEL=${TENSOR_PARALLEL:-2}
# beside the serving engine, 14 B parameters with Adam's states do not fit into 80 GB
exec bash recipe/common/run_math.sh task=deepsearch actor_rollout_ref.actor.fsdp_config.optimizer_offload=true "$@"
