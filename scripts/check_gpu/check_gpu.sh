#!/usr/bin/env bash
# Checks, on a machine with a GPU and the GPU extra, what this project cannot check on a CPU: a warm start, two steps
# of every recipe, both of vLLM's model runners, an evaluation. Should take an hour, and at most two.
#   [MODEL_PATH=a small model instead of the tiny one] bash scripts/check_gpu/check_gpu.sh [PART...]
# Each part prints "NAME passed|failed|timed out (seconds, log)"; the exit code is 1 if one did not pass. With two GPUs, name
# the parts two_gpus_v1 and two_gpus_v2 afterwards. Logs: outputs/check_gpu/PART.log. With DRY_RUN=1 the parts of recipes
# compose and check their configs, without a GPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/environment.sh
use_hardware gpu
unset RAY_ADDRESS VERBOSE
gpus=${CUDA_VISIBLE_DEVICES:-}
export CUDA_VISIBLE_DEVICES=${gpus:-0} HARDWARE=gpu NNODES=1 N_GPUS_PER_NODE=1 SEED=0
chosen=" $* " ran=0 failed=0
folder=$(realpath -m "${CHECK_DIR:-outputs/check_gpu}")
mkdir -p "$folder"
if [ -n "${MODEL_PATH:-}" ]; then
    base=$MODEL_PATH sft=(data.train_batch_size=32 trainer.total_training_steps=60)
else
    base=$folder/inputs/model sft=(data.train_batch_size=32 optim.lr=2.0e-3)
    export HF_HUB_OFFLINE=1
fi
trap 'kill "$!"; wait; exit 1' INT TERM HUP

# part NAME SECONDS COMMAND...: runs a part for at most so many seconds, in an empty RUN_DIR of its own
part() {
    local name=$1 result=passed began=$SECONDS
    [[ $chosen = "  " || $chosen = *" $name "* ]] || return 0
    ran=$((ran + 1))
    rm -rf "${folder:?}/$name"
    RUN_DIR=$folder/$name EXPERIMENT_NAME=$(realpath -m --relative-to=outputs "$folder/$name") \
        timeout --kill-after=30 "$2" "${@:3}" >"$folder/$name.log" 2>&1 &
    wait "$!" || { [[ $? = 124 || $? = 137 ]] && result="timed out" || result=failed; }
    [ "$result" = passed ] || failed=1
    echo "$name $result ($((SECONDS - began)) s, $folder/$name.log)"
}

# use_task TASK PART: the parts below train on this task, from the model that PART has made, or without one the base model
use_task() {
    export DATA_DIR=$folder/inputs/$1 MODEL_PATH=$base
    export TRAIN_FILE=$DATA_DIR/train.parquet VAL_FILE=$DATA_DIR/test.parquet
    [ ! -d "$folder/$2/huggingface" ] || MODEL_PATH=$folder/$2/huggingface
}

# vLLM gets a small share of the memory: with more, the tiny model's cache would have millions of blocks. No torch.compile and
# no CUDA graphs: without a cache they take minutes; only the part `grpo` has both.
steps=(
    data.train_batch_size=8 actor_rollout_ref.actor.ppo_mini_batch_size=4 actor_rollout_ref.rollout.max_num_seqs=64
    actor_rollout_ref.rollout.gpu_memory_utilization=0.3 actor_rollout_ref.rollout.agent.num_workers=1
    reward.num_workers=1 transfer_queue.backend.SimpleStorage.num_data_storage_units=1 trainer.n_gpus_per_node=1
    actor_rollout_ref.rollout.enforce_eager=true
    trainer.total_training_steps=2 trainer.save_freq=2 trainer.test_freq=2 trainer.val_before_train=false
)
countdown=(
    "${steps[@]}" data.max_prompt_length=128 data.max_response_length=32
    reward.reward_kwargs.overlong_buffer_cfg.len=8
)
part environment 120 bash -c "python -m torch.utils.collect_env
    python -c 'import torch; torch.cuda.init(); import flash_attn, verl, vllm'"
[ $failed = 0 ] || { cat "$folder/environment.log" >&2 && exit 1; }
part inputs 180 python scripts/check_gpu/check_gpu_inputs.py "$folder/inputs" "$base"
use_task countdown none
part warm_start 260 bash recipe/common/run_warm_start.sh "${sft[@]}"
use_task countdown warm_start
# filtering needs groups with right and wrong answers, which only a warm-started model gives
[ "$MODEL_PATH" = "$base" ] && filter=false || filter=true
filtered=("${countdown[@]}" "algorithm.filter_groups.enable=$filter")
lookahead=(
    'actor_rollout_ref.rollout.kt.rollout_filter_steps=[3,5]' actor_rollout_ref.rollout.kt.prob_filter_abs_thres=0.05
    actor_rollout_ref.rollout.kt.prob_filter_rel_thres=0.8
)
search=(hato.tree.max_step_tokens=4 hato.tree.max_depth=2 hato.tree.branching_factor=4)
part grpo 480 bash recipe/common/run_grpo_countdown.sh "${countdown[@]}" actor_rollout_ref.rollout.enforce_eager=false
part dapo 480 bash recipe/common/run_dapo_countdown.sh "${filtered[@]}"
part hapo 480 env CONFIG_DIR=recipe/hapo/config METHOD=hapo bash recipe/common/run_countdown.sh "${filtered[@]}"
part latr 480 bash recipe/latr/grpo-kt-countdown.sh update=tree "${countdown[@]}" "${lookahead[@]}"
part hato 480 env CONFIG_DIR=recipe/hato/config METHOD=hato bash recipe/common/run_countdown.sh \
    "${countdown[@]}" "${search[@]}"
# the checkpoint of the part `grpo`, or the model if there is no checkpoint
[ -f "$folder/grpo/global_step_2/COMPLETE" ] && evaluated=step=2 || evaluated=model=$MODEL_PATH
part evaluation 360 bash scripts/eval-countdown.sh "$(realpath -m --relative-to=outputs "$folder/grpo")" "$evaluated" \
    output_dir="$folder/evaluation" max_tokens=32 \
    'server.options=[--enforce-eager,--max-num-seqs,"64",--gpu-memory-utilization,"0.3"]'

use_task search_task none
part cold_start 260 env DATA_DIR="$DATA_DIR/sft" bash recipe/arpo/run_sft.sh trainer.total_epochs=1 "${sft[@]}"
use_task search_task cold_start
export MAX_PROMPT_LENGTH=128 MAX_RESPONSE_LENGTH=256 CONFIG_DIR=recipe/arpo/config METHOD=arpo
agent=(
    bash recipe/common/run_math.sh task=search_task "${steps[@]}"
    actor_rollout_ref.rollout.tools.tool_instances.search.params.corpus="$DATA_DIR/corpus.jsonl"
)
# What vLLM's two model runners do in different code, tried together: seeds, LoRA, scores of answers. vLLM 0.24 takes V1
# for Qwen2, the base model, and with HAPO's temperature, and V2 for Qwen3.
features=(+actor_rollout_ref.rollout.custom.request_seeds=true credit=igpo update=tree)
v1=(env MODEL_PATH="$base") v2=(env MODEL_PATH="$folder/inputs/qwen3")
part arpo 480 "${agent[@]}"
part aepo 480 env METHOD=aepo "${agent[@]}"
part runner_v1 480 "${v1[@]}" LORA_RANK=8 "${agent[@]}" sampler=tempered "${features[@]}"
part runner_v2 480 "${v2[@]}" LORA_RANK=8 "${agent[@]}" "${features[@]}"
if [ $# -gt 0 ]; then # shards and Ulysses; then shards and the prefix tree
    two=(N_GPUS_PER_NODE=2 TENSOR_PARALLEL=2 CUDA_VISIBLE_DEVICES="${gpus:-0,1}")
    part two_gpus_v1 480 "${v1[@]}" "${two[@]}" SEQUENCE_PARALLEL=2 "${agent[@]}" trainer.n_gpus_per_node=2
    part two_gpus_v2 480 "${v2[@]}" "${two[@]}" "${agent[@]}" trainer.n_gpus_per_node=2 update=tree
    [ $ran = $# ] || { echo "error: of the parts $*, $ran are known" >&2 && exit 2; }
fi
exit $failed
