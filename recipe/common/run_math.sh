#!/usr/bin/env bash
# Trains on mathematics with the config METHOD_trainer of CONFIG_DIR; the recipes' run scripts for mathematics call it.
#   MODEL_PATH  TRAIN_FILE  VAL_FILE  NNODES  N_GPUS_PER_NODE  MAX_PROMPT_LENGTH  MAX_RESPONSE_LENGTH  TENSOR_PARALLEL
#   SEQUENCE_PARALLEL  SEED  EXPERIMENT_NAME  RUN_DIR; RAY_ADDRESS of a running cluster for several nodes.
#   MAX_POSITION_EMBEDDINGS stretches a model's context, as the authors of HAPO do. DRY_RUN=1 only checks and tells.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/environment.sh
HARDWARE=gpu
use_hardware gpu

CONFIG_DIR=${CONFIG_DIR:?set CONFIG_DIR to the recipe\'s config folder}
METHOD=${METHOD:?set METHOD to the name of a config in $CONFIG_DIR, without _trainer.yaml}
MODEL_PATH=${MODEL_PATH:?set MODEL_PATH to a Hugging Face model}
TRAIN_FILE=${TRAIN_FILE:-outputs/data/math/dapo-math-17k.parquet}
VAL_FILE=${VAL_FILE:-${TEST_FILE:-outputs/data/math/valid.parquet}} # TEST_FILE: in HAPO's scripts
SEED=${SEED:-0}
EXPERIMENT_NAME=${EXPERIMENT_NAME:-${METHOD}_$(basename "$MODEL_PATH" | tr '[:upper:]' '[:lower:]')_seed$SEED}
RUN_DIR=${RUN_DIR:-$PWD/outputs/$EXPERIMENT_NAME}
MAX_PROMPT_LENGTH=${MAX_PROMPT_LENGTH:-1024}
MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-8192}
SEQUENCE_PARALLEL=${SEQUENCE_PARALLEL:-1}
export NNODES=${NNODES:-1} N_GPUS_PER_NODE=${N_GPUS_PER_NODE:-8}
# a micro-batch holds two of the longest sequences on every worker of a sequence-parallel group
MICRO_BATCH_TOKENS=$((2 * (MAX_PROMPT_LENGTH + MAX_RESPONSE_LENGTH)))
CONTEXT=()
if [ -n "${MAX_POSITION_EMBEDDINGS:-}" ]; then
    # of the trainer, and of vLLM, which reads the model's own config
    CONTEXT+=("+actor_rollout_ref.model.override_config.max_position_embeddings=$MAX_POSITION_EMBEDDINGS")
    CONTEXT+=("+actor_rollout_ref.rollout.engine_kwargs.vllm.hf_overrides.max_position_embeddings=$MAX_POSITION_EMBEDDINGS")
fi

train "${METHOD}_trainer" \
    data.max_prompt_length="$MAX_PROMPT_LENGTH" \
    data.max_response_length="$MAX_RESPONSE_LENGTH" \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu="$MICRO_BATCH_TOKENS" \
    actor_rollout_ref.actor.ulysses_sequence_parallel_size="$SEQUENCE_PARALLEL" \
    actor_rollout_ref.rollout.tensor_model_parallel_size="${TENSOR_PARALLEL:-1}" \
    ${CONTEXT[@]+"${CONTEXT[@]}"} \
    "$@"
