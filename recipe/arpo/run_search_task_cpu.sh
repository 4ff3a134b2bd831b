#!/usr/bin/env bash
# Agents that search and compute, small enough for a laptop: data, cold start and METHOD=grpo|arpo|aepo.
#   [METHOD=arpo] [SEED=0] [HOPS=2] [ENVIRONMENT=tools] bash recipe/arpo/run_search_task_cpu.sh [hydra overrides]; DRY_RUN=1
#   only checks and tells. HOPS: searches that a question needs, such as 3, or 3-5. ENVIRONMENT=chat: the model calls tools
#   as its chat template says, instead of in tags.
# What is there already (outputs/data/search_task, outputs/search_task_sft; with HOPS=3 outputs/data/search_task_3hops,
# outputs/search_task_3hops_sft; with ENVIRONMENT=chat outputs/search_task_chat_sft) is used.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/environment.sh
source recipe/tasks/search/search_task.sh

METHOD=${METHOD:-arpo}
SEED=${SEED:-0}
HOPS=${HOPS:-2}
ENVIRONMENT=${ENVIRONMENT:-tools}
use_hops "$HOPS"
use_environment "$ENVIRONMENT"
EXPERIMENT_NAME=${EXPERIMENT_NAME:-${METHOD}_${TASK_NAME}${TASK_NAME_SUFFIX:-}_seed$SEED}
DATA_DIR=${DATA_DIR:-outputs/data/$TASK_NAME}
RUN_DIR=${RUN_DIR:-$PWD/outputs/$EXPERIMENT_NAME}
HARDWARE=cpu
use_hardware cpu
make_once "$DATA_DIR/train.parquet" \
    python -m recipe.tasks.search.data --output-dir "$DATA_DIR" "${DATA_OPTIONS[@]}"
if [ -z "${MODEL_PATH:-}" ]; then
    MODEL_PATH=outputs/$COLD_START/huggingface
    make_once "$MODEL_PATH" env -u EXPERIMENT_NAME -u RUN_DIR HOPS="$HOPS" ENVIRONMENT="$ENVIRONMENT" DATA_DIR="$DATA_DIR" \
        bash recipe/arpo/run_search_task_sft_cpu.sh
fi

CONFIG_DIR=recipe/arpo/config TRAIN_FILE=$DATA_DIR/train.parquet VAL_FILE=$DATA_DIR/test.parquet
train "${METHOD}_trainer" task=search_task update=tree environment="$ENVIRONMENT" \
    data.max_prompt_length="$MAX_PROMPT_LENGTH" data.max_response_length="$MAX_RESPONSE_LENGTH" \
    actor_rollout_ref.rollout.tools.call_limit="$CALL_LIMIT" \
    actor_rollout_ref.rollout.tools.tool_instances.search.params.corpus="$(quoted "$(realpath -m "$DATA_DIR")/corpus.jsonl")" \
    "$@"
