#!/usr/bin/env bash
# Trains SmolLM2-135M-Instruct on word problems on a laptop, with the config METHOD_trainer of CONFIG_DIR; the scripts
# run_smollm2_cpu.sh call it. Missing data and the model's folder are made first. DRY_RUN=1 checks config and files, tells
# the plan and starts nothing. SEED, EXPERIMENT_NAME, RUN_DIR, DATA_DIR and MODEL_PATH are read as for other scripts.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/environment.sh
HARDWARE=cpu
use_hardware cpu

CONFIG_DIR=${CONFIG_DIR:-recipe/common/config}
METHOD=${METHOD:?set METHOD to the name of a config in $CONFIG_DIR, without _trainer.yaml}
SEED=${SEED:-0}
EXPERIMENT_NAME=${EXPERIMENT_NAME:-${METHOD}_smollm2_seed$SEED}
RUN_DIR=${RUN_DIR:-$PWD/outputs/$EXPERIMENT_NAME}
DATA_DIR=${DATA_DIR:-outputs/data/word_problems}
TRAIN_FILE=$DATA_DIR/train.parquet VAL_FILE=$DATA_DIR/valid.parquet
if [ -z "${MODEL_PATH:-}" ]; then
    MODEL_PATH=outputs/smollm2
    make_once "$MODEL_PATH" python -m recipe.common.smollm2 --output-dir "$MODEL_PATH"
fi
make_once "$TRAIN_FILE" python -m recipe.tasks.word_problems.data --output-dir "$DATA_DIR"

# rows are padded to the lengths on CPU; a micro-batch holds two prompts with the responses that share them
settings=(
    task=word_problems
    update=tree
    data.train_batch_size=8
    data.max_prompt_length=128
    data.max_response_length=64
    reward.reward_kwargs.overlong_buffer_cfg.len=16
    actor_rollout_ref.actor.ppo_mini_batch_size=8
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1280
    actor_rollout_ref.actor.optim.lr=1e-5
    # at 1 many of its answers are spoiled by a token of low probability
    actor_rollout_ref.rollout.temperature=0.7
    actor_rollout_ref.rollout.val_kwargs.n=4
    actor_rollout_ref.rollout.val_kwargs.temperature=0.7
    actor_rollout_ref.rollout.val_kwargs.top_p=1.0
    actor_rollout_ref.rollout.val_kwargs.top_k=-1
    trainer.total_training_steps=60
    trainer.save_freq=60
)
# bfloat16 for the matrix products of rollout and update where the processor has instructions for them: half the time;
# without them it is three times as slow as float32. The trained weights stay float32.
if grep -qwE 'avx512_bf16|amx_bf16|bf16' /proc/cpuinfo; then
    settings+=(
        actor_rollout_ref.rollout.dtype=bfloat16
        actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=bf16
    )
fi
train "${CONFIG_NAME:-${METHOD}_trainer}" "${settings[@]}" "$@"
