#!/usr/bin/env bash
# Cold start on the made task: the tiny model learns to think, search, compute and answer, half of it wrongly.
# Ends with outputs/search_task_sft/huggingface. HOPS=3, or 3-5: searches that a question needs; then
# outputs/search_task_3hops_sft/huggingface. ENVIRONMENT=chat: with the calls of the chat template.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/environment.sh
source recipe/tasks/search/search_task.sh

ENVIRONMENT=${ENVIRONMENT:-tools}
use_hops "${HOPS:-2}"
use_environment "$ENVIRONMENT"
DATA_DIR=${DATA_DIR:-outputs/data/$TASK_NAME}
export EXPERIMENT_NAME=${EXPERIMENT_NAME:-$COLD_START}
use_hardware cpu
if [ ! -f "$DATA_DIR/demonstrations.jsonl" ]; then
    # files of yours would be written over
    if [ -e "$DATA_DIR/train.parquet" ]; then
        echo "error: DATA_DIR=$DATA_DIR has no demonstrations.jsonl, which the cold start is taught: add it" >&2
        exit 2
    fi
    python -m recipe.tasks.search.data --output-dir "$DATA_DIR" "${DATA_OPTIONS[@]}"
fi
if [ -z "${MODEL_PATH:-}" ]; then
    MODEL_PATH=$TASK_MODEL
    [ -d "$MODEL_PATH" ] || python -m recipe.tasks.search.data "$MODEL_OPTION" "$MODEL_PATH"
fi
[ -f "$DATA_DIR/$SFT_DIR/train.parquet" ] || python -m recipe.arpo.sft_data --environment "$ENVIRONMENT" \
    --input "$DATA_DIR/demonstrations.jsonl" --output "$DATA_DIR/$SFT_DIR" --tokenizer "$MODEL_PATH"
HARDWARE=cpu DATA_DIR="$DATA_DIR/$SFT_DIR" MODEL_PATH="$MODEL_PATH" exec bash recipe/arpo/run_sft.sh \
    data.environment="$ENVIRONMENT" trainer.total_epochs=1 data.train_batch_size=32 trainer.test_freq=-1 "$@"
