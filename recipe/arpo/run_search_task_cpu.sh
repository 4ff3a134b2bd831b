#!/usr/bin/env bash
# Agents that search and compute, small enough for a laptop: data, cold start and METHOD=grpo|arpo|aepo.
#   [METHOD=arpo] [SEED=0] bash recipe/arpo/run_search_task_cpu.sh [hydra overrides]; DRY_RUN=1 only checks and tells.
# What is there already (outputs/data/search_task, outputs/search_task_sft) is used.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/environment.sh

METHOD=${METHOD:-arpo}
SEED=${SEED:-0}
EXPERIMENT_NAME=${EXPERIMENT_NAME:-${METHOD}_search_task_seed$SEED}
DATA_DIR=${DATA_DIR:-outputs/data/search_task}
RUN_DIR=${RUN_DIR:-$PWD/outputs/$EXPERIMENT_NAME}
HARDWARE=cpu
use_hardware cpu
[ -f "$DATA_DIR/test.parquet" ] || python -m recipe.arpo.search_task --output-dir "$DATA_DIR"
if [ -z "${MODEL_PATH:-}" ]; then
    MODEL_PATH=outputs/search_task_sft/huggingface
    if [ ! -d "$MODEL_PATH" ] && [ "${DRY_RUN:-0}" = 0 ]; then
        env -u EXPERIMENT_NAME -u RUN_DIR DATA_DIR="$DATA_DIR" bash recipe/arpo/run_search_task_sft_cpu.sh
    fi
fi

CONFIG_DIR=recipe/arpo/config TRAIN_FILE=$DATA_DIR/train.parquet VAL_FILE=$DATA_DIR/test.parquet
train "${METHOD}_trainer" task=search_task update=tree data.max_prompt_length=24 data.max_response_length=128 \
    actor_rollout_ref.rollout.tools.tool_instances.search.params.corpus="$(realpath -m "$DATA_DIR")/corpus.jsonl" \
    "$@"
