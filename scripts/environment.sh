# The scripts source this file in the repository's root. It activates the environment and sets the variables that a
# hardware profile needs in the first process; the profile's YAML holds everything else.

source "${BASH_SOURCE[0]%/*}/quoted.sh"

# an environment that is active already takes precedence over .venv, but not conda's base, which shells activate unasked
active_conda=${CONDA_PREFIX:-}
[ "${CONDA_DEFAULT_ENV:-}" != base ] || active_conda=
if [ -z "${VIRTUAL_ENV:-}$active_conda" ] && [ -d .venv ]; then
    source .venv/bin/activate
    activated=1
fi

# use_hardware cpu|gpu: sets HARDWARE_SUFFIX ("" or "_gpu"), which ends the names of data, models and runs that both
# profiles have. The .venv of scripts/setup.sh holds the CPU stack, so a GPU run deactivates it and takes the Python of
# the machine or container. A dry run may check the config in it.
use_hardware() {
    case "$1" in
    cpu)
        HARDWARE_SUFFIX=
        # verl chooses a platform when it is imported, before any config is read
        export VERL_PLATFORM=cpu HF_HUB_OFFLINE=1 VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1}
        [ "${OMP_NUM_THREADS:-0}" != 0 ] || OMP_NUM_THREADS=2
        export OMP_NUM_THREADS OMP_WAIT_POLICY=PASSIVE
        # each vLLM engine would compile, for four seconds, a function that counts the tokens above a log-probability
        export TORCH_COMPILE_DISABLE=${TORCH_COMPILE_DISABLE:-1}
        # Ray would start workers before it knows the run's environment, and use none of them
        export RAY_prestart_worker_first_driver=0
        ;;
    gpu)
        HARDWARE_SUFFIX=_gpu
        if [ "${VERL_PLATFORM:-}" = cpu ] && command -v nvidia-smi >/dev/null; then
            echo "note: VERL_PLATFORM=cpu is exported and is left out, as HARDWARE=gpu and this machine has GPUs" >&2
            unset VERL_PLATFORM
        fi
        case "${HF_HUB_OFFLINE:-0}" in
        0 | "") ;;
        *) echo "note: HF_HUB_OFFLINE=$HF_HUB_OFFLINE is exported: models and data come from this machine alone" >&2 ;;
        esac
        # FlashInfer's sampler is compiled when a server starts, which fails where there is no nvcc
        export VLLM_USE_FLASHINFER_SAMPLER=${VLLM_USE_FLASHINFER_SAMPLER:-0}
        if [ -n "${activated:-}" ] && [ -f .venv/installed-from ] && [ "${DRY_RUN:-0}" = 0 ]; then
            deactivate
        fi
        if ! python -c 'import sys, importlib.util; sys.exit(importlib.util.find_spec("vllm") is None)'; then
            echo "error: $(command -v python || echo python) has no vllm: activate an environment with the GPU extra" \
                "(README.md, On GPUs); the .venv of scripts/setup.sh is for HARDWARE=cpu" >&2
            exit 2
        fi
        ;;
    *)
        echo "error: HARDWARE=$1: choose cpu or gpu" >&2
        exit 2
        ;;
    esac
}

# make_once PATH COMMAND...: makes what is not there, but not for a dry run. Of runs that begin together the first makes it,
# and the others wait.
make_once() {
    [ ! -e "$1" ] || return 0
    if [ "${DRY_RUN:-0}" != 0 ]; then
        echo "note: $1 is not there yet: the run, without DRY_RUN, makes it first" >&2
        return
    fi
    mkdir -p outputs
    (
        flock --nonblock 9 || {
            echo "waiting for another run, which makes data, models or a warm start under outputs/" >&2
            flock 9
        }
        [ -e "$1" ] || "${@:2}" 9>&-
    ) 9>outputs/.inputs.lock
}

# run_python ARGUMENT...: ends the script with this Python program. Without GPUs it and what it starts are forks of one
# process that has made the imports; a dry run does not wait for these.
run_python() {
    if [ -n "${HARDWARE_SUFFIX}${FORK_SERVER:-}" ] || [ "${DRY_RUN:-0}" != 0 ]; then
        exec python "$@"
    fi
    exec python scripts/fork_server/fork_server.py python "$@"
}

# train CONFIG_NAME [OVERRIDE...]: trains by the launcher with a config of CONFIG_DIR; with DRY_RUN=1 it only checks config
# and files. Reads HARDWARE, MODEL_PATH, LORA_RANK, TRAIN_FILE, VAL_FILE, SEED, EXPERIMENT_NAME and RUN_DIR.
train() {
    local command=(
        python -m verl.trainer.main_ppo
        --config-dir "$CONFIG_DIR" --config-name "$1"
        hardware="$HARDWARE"
        actor_rollout_ref.model.path="$(quoted "$MODEL_PATH")"
        ${LORA_RANK:+actor_rollout_ref.model.lora_rank="$LORA_RANK"}
        data.train_files="$(quoted "$TRAIN_FILE")"
        data.val_files="$(quoted "$VAL_FILE")"
        data.seed="$SEED"
        actor_rollout_ref.rollout.seed="$SEED"
        actor_rollout_ref.actor.fsdp_config.seed="$SEED"
        trainer.experiment_name="$(quoted "$EXPERIMENT_NAME")"
        trainer.default_local_dir="$(quoted "$RUN_DIR")"
        "${@:2}"
    )
    case "${DRY_RUN:-0}" in
    0) exec python scripts/launch.py "$RUN_DIR" -- "${command[@]}" ;;
    *) exec "${command[@]}" ;;
    esac
}

# train_sft [OVERRIDE...]: trains with upstream's SFT trainer by the launcher, in PROCESSES processes; the last checkpoint's
# model is then RUN_DIR/huggingface. A signal to the script ends the training.
train_sft() {
    local code=0
    # bash runs no trap while it waits for a process in the foreground
    trap 'kill "${!:-}" 2>/dev/null || exit 143' TERM INT HUP
    # INFO: upstream then says how many steps there will be, which the bar shows
    VERL_FILE_LOGGER_PATH="$RUN_DIR/metrics.jsonl" VERL_SFT_LOGGING_LEVEL=INFO python scripts/launch.py "$RUN_DIR" -- \
        python -m torch.distributed.run --standalone --nproc_per_node="$PROCESSES" -m verl.trainer.sft_trainer "$@" &
    wait $! || code=$?
    wait $! || code=$? # a signal has ended the first wait
    trap - TERM INT HUP
    [ "$code" = 0 ] || exit "$code"
    local step
    step=$(cat "$RUN_DIR/latest_checkpointed_iteration.txt")
    rm -rf "$RUN_DIR/huggingface.tmp"
    cp -r "$RUN_DIR/global_step_$step/huggingface" "$RUN_DIR/huggingface.tmp"
    rm -rf "$RUN_DIR/huggingface"
    mv "$RUN_DIR/huggingface.tmp" "$RUN_DIR/huggingface"
}
