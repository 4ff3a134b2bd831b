#!/usr/bin/env bash
# Trains on Countdown, or another small task (TASK=walk), with the config METHOD_trainer of CONFIG_DIR; the recipes' run
# scripts for Countdown call it.
# Missing data and, without MODEL_PATH, a missing warm start are made first. The names of HARDWARE=gpu's data, warm start and
# runs end with _gpu; NNODES and N_GPUS_PER_NODE, and RAY_ADDRESS of a running cluster for several nodes, count there.
# DRY_RUN=1 checks config and files, tells the plan and starts nothing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/environment.sh
source recipe/common/small_tasks.sh

CONFIG_DIR=${CONFIG_DIR:-recipe/common/config}
METHOD=${METHOD:?set METHOD to the name of a config in $CONFIG_DIR, without _trainer.yaml}
HARDWARE=${HARDWARE:-cpu}
SEED=${SEED:-0}
use_hardware "$HARDWARE"
use_task "${TASK:-countdown}"
EXPERIMENT_NAME=${EXPERIMENT_NAME:-${METHOD}_$TASK${HARDWARE_SUFFIX}_seed$SEED}
DATA_DIR=${DATA_DIR:-outputs/data/$TASK$HARDWARE_SUFFIX}
RUN_DIR=${RUN_DIR:-$PWD/outputs/$EXPERIMENT_NAME}
make_once "$DATA_DIR/train.parquet" make_data "$HARDWARE" "$DATA_DIR"
if [ -z "${MODEL_PATH:-}" ]; then
    MODEL_PATH=outputs/$WARM_START$HARDWARE_SUFFIX/huggingface
    # a name given to this run is not the warm start's, and data of yours may have no demonstrations
    demonstrations=()
    [ ! -f "$DATA_DIR/sft.parquet" ] || demonstrations=(DATA_DIR="$DATA_DIR")
    make_once "$MODEL_PATH" env -u EXPERIMENT_NAME -u RUN_DIR -u DATA_DIR HARDWARE="$HARDWARE" TASK="$TASK" \
        ${demonstrations[@]+"${demonstrations[@]}"} bash recipe/common/run_warm_start.sh
fi

TRAIN_FILE=$DATA_DIR/train.parquet VAL_FILE=$DATA_DIR/$VAL_SPLIT.parquet
train "${CONFIG_NAME:-${METHOD}_trainer}" task="$TASK" ${TASK_OPTIONS[@]+"${TASK_OPTIONS[@]}"} "$@"
