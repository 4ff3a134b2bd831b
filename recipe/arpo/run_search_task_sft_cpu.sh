#!/usr/bin/env bash
# Cold start on the made task: the tiny model learns to think, search, compute and answer, half of it wrongly.
# Ends with outputs/search_task_sft/huggingface. HOPS=3, or 3-5: searches that a question needs; then
# outputs/search_task_3hops_sft/huggingface.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/environment.sh
source recipe/arpo/search_task.sh

use_hops "${HOPS:-2}"
DATA_DIR=${DATA_DIR:-outputs/data/$TASK_NAME}
MODEL_PATH=${MODEL_PATH:-outputs/search_task_model}
export EXPERIMENT_NAME=${EXPERIMENT_NAME:-$COLD_START}
use_hardware cpu
{ [ -f "$DATA_DIR/train.parquet" ] && [ -f "$DATA_DIR/demonstrations.jsonl" ]; } ||
    python -m recipe.arpo.search_task --output-dir "$DATA_DIR" "${DATA_OPTIONS[@]}"
[ -d "$MODEL_PATH" ] || python -m recipe.arpo.search_task --model-dir "$MODEL_PATH"
[ -f "$DATA_DIR/sft/train.parquet" ] || python -m recipe.arpo.sft_data \
    --input "$DATA_DIR/demonstrations.jsonl" --output "$DATA_DIR/sft" --tokenizer "$MODEL_PATH"
HARDWARE=cpu DATA_DIR="$DATA_DIR/sft" MODEL_PATH="$MODEL_PATH" exec bash recipe/arpo/run_sft.sh \
    trainer.total_epochs=1 data.train_batch_size=32 trainer.test_freq=-1 "$@"
