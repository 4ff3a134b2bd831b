#!/usr/bin/env bash
# Cold start of ARPO: teaches MODEL_PATH to think, call tools and answer, with upstream's SFT trainer.
#   HARDWARE=gpu|cpu  MODEL_PATH=...  DATA_DIR=...  EXPERIMENT_NAME=...  RUN_DIR=...  N_GPUS_PER_NODE=8
#   bash recipe/arpo/run_sft.sh [hydra overrides]; DRY_RUN=1 only checks and tells.
# DATA_DIR holds train.parquet and maybe val.parquet of recipe.arpo.sft_data. The same command resumes a run that ended
# early. Ends with a Hugging Face folder: $RUN_DIR/huggingface
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/environment.sh

HARDWARE=${HARDWARE:-gpu}
EXPERIMENT_NAME=${EXPERIMENT_NAME:-arpo_sft}
DATA_DIR=${DATA_DIR:-outputs/data/arpo_sft}
RUN_DIR=${RUN_DIR:-$PWD/outputs/$EXPERIMENT_NAME}
export N_GPUS_PER_NODE=${N_GPUS_PER_NODE:-8}
use_hardware "$HARDWARE"
OVERRIDES=()
if [ "$HARDWARE" = cpu ]; then
    MODEL_PATH=${MODEL_PATH:-outputs/tiny_model}
    PROCESSES=1
    # the tiny model's length, and a rate at which it learns
    OVERRIDES+=(data.max_length=2048 data.max_token_len_per_gpu=4096 optim.lr=2.0e-3)
else
    MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-7B-Instruct}
    PROCESSES=$N_GPUS_PER_NODE
fi

if [ ! -f "$DATA_DIR/train.parquet" ]; then
    echo "error: $DATA_DIR/train.parquet does not exist; make it from conversations with tools:" >&2
    echo "  python -m recipe.arpo.sft_data --input FILE --output $DATA_DIR --tokenizer $MODEL_PATH" >&2
    exit 2
fi
if [ -f "$DATA_DIR/val.parquet" ]; then
    OVERRIDES+=(data.val_files="$(quoted "$DATA_DIR/val.parquet")")
else
    OVERRIDES+=(trainer.test_freq=-1) # upstream validates at test_freq even without files
fi
settings=(
    --config-dir recipe/arpo/config --config-name arpo_sft
    hardware="$HARDWARE"
    model.path="$(quoted "$MODEL_PATH")"
    data.train_files="$(quoted "$DATA_DIR/train.parquet")"
    trainer.experiment_name="$(quoted "$EXPERIMENT_NAME")"
    trainer.default_local_dir="$(quoted "$RUN_DIR")"
    ${OVERRIDES[@]+"${OVERRIDES[@]}"}
    "$@"
)
if [ "${DRY_RUN:-0}" != 0 ]; then
    python -m verl.trainer.sft_trainer "${settings[@]}" --cfg job --resolve >/dev/null
    rows='import sys, pyarrow.parquet as pq; print(pq.read_metadata(sys.argv[1]).num_rows)'
    echo "$(python -c "$rows" "$DATA_DIR/train.parquet") responses to learn, $PROCESSES process(es); nothing was started"
    exit
fi

if [ "$HARDWARE" = cpu ] && [ "$MODEL_PATH" = outputs/tiny_model ] && [ ! -d "$MODEL_PATH" ]; then
    python -m recipe.common.tiny_model --output-dir "$MODEL_PATH"
fi
train_sft "${settings[@]}"
echo "cold start: $RUN_DIR/huggingface"
