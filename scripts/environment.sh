# Sourced by the scripts, from the repository's root: the environment to run in, and what a hardware profile needs
# in the environment of the first process (everything else is the profile's YAML).

# an active environment that has the project wins over .venv
if [ -z "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ] && [ -d .venv ]; then
    source .venv/bin/activate
fi

use_hardware() {
    case "$1" in
    cpu)
        # verl chooses a platform when it is imported, before any config is read
        export VERL_PLATFORM=cpu HF_HUB_OFFLINE=1 VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1}
        export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} OMP_WAIT_POLICY=PASSIVE
        ;;
    gpu) ;;
    *)
        echo "error: HARDWARE=$1: choose cpu or gpu" >&2
        exit 2
        ;;
    esac
}

# start_run RUN_DIR COMMAND...: under the launcher; with DRY_RUN=1 the command checks its config and files, and ends
start_run() {
    local run_dir=$1
    shift
    case "${DRY_RUN:-0}" in
    0) exec python scripts/launch.py "$run_dir" -- "$@" ;;
    *) exec "$@" ;;
    esac
}
