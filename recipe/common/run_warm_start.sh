#!/usr/bin/env bash
# Warm start: teaches MODEL_PATH the answer format on demonstrations, with upstream's SFT trainer.
#   HARDWARE=cpu|gpu  TASK=countdown|walk  MODEL_PATH=...  DATA_DIR=...  EXPERIMENT_NAME=...
#       bash recipe/common/run_warm_start.sh [hydra overrides]
# Ends with a Hugging Face folder, outputs/warm_start/huggingface or outputs/warm_start_gpu/huggingface (warm_start_walk for
# TASK=walk). One node. DRY_RUN=1 makes the data and checks the config.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/environment.sh
source recipe/common/small_tasks.sh

HARDWARE=${HARDWARE:-cpu}
use_hardware "$HARDWARE"
use_task "${TASK:-countdown}"
EXPERIMENT_NAME=${EXPERIMENT_NAME:-$WARM_START$HARDWARE_SUFFIX}
DATA_DIR=${DATA_DIR:-outputs/data/$TASK$HARDWARE_SUFFIX}
RUN_DIR=${RUN_DIR:-$PWD/outputs/$EXPERIMENT_NAME}
if [ ! -f "$DATA_DIR/sft.parquet" ]; then
    # files of yours would be written over
    if [ -e "$DATA_DIR/train.parquet" ]; then
        echo "error: DATA_DIR=$DATA_DIR has no sft.parquet, the demonstrations of a warm start: add them, or set" \
            "MODEL_PATH of the training to a model that needs none" >&2
        exit 2
    fi
    make_data "$HARDWARE" "$DATA_DIR"
fi
if [ "$HARDWARE" = cpu ]; then
    if [ -z "${MODEL_PATH:-}" ]; then
        MODEL_PATH=outputs/$TINY_MODEL
        [ -d "$MODEL_PATH" ] || make_tiny_model "$MODEL_PATH"
    fi
    PROCESSES=1
    # in layers this small a second thread costs more than it gains
    export OMP_NUM_THREADS=1
else
    MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-0.5B}
    PROCESSES=${N_GPUS_PER_NODE:-8}
fi

settings=(
    --config-dir recipe/common/config/sft --config-name warm_start
    hardware="$HARDWARE"
    model.path="$(quoted "$MODEL_PATH")"
    data.train_files="$(quoted "$DATA_DIR/sft.parquet")"
    trainer.experiment_name="$(quoted "$EXPERIMENT_NAME")"
    trainer.default_local_dir="$(quoted "$RUN_DIR")"
    ${WARM_START_OPTIONS[@]+"${WARM_START_OPTIONS[@]}"}
    "$@"
)
if [ "${DRY_RUN:-0}" != 0 ]; then
    python -m verl.trainer.sft_trainer "${settings[@]}" --cfg job --resolve >/dev/null
    echo "dry run: the config composes, the data is there, nothing was started"
    exit
fi

train_sft "${settings[@]}"
echo "warm start: $RUN_DIR/huggingface"
