# Sourced by the scripts, from the repository's root: the environment to run in, and what a hardware profile needs
# in the environment of the first process (everything else is the profile's YAML).

# an active environment that has the project wins over .venv
if [ -z "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ] && [ -d .venv ]; then
    source .venv/bin/activate
    activated=1
fi

# use_hardware cpu|gpu: sets HARDWARE_SUFFIX ("" or "_gpu"), which ends the names of data, models and runs that both
# profiles have. A .venv made by scripts/setup.sh holds the CPU stack: a GPU run leaves it for the Python that is there
# (a container's); a dry run may check the config in it.
use_hardware() {
    case "$1" in
    cpu)
        HARDWARE_SUFFIX=
        # verl chooses a platform when it is imported, before any config is read
        export VERL_PLATFORM=cpu HF_HUB_OFFLINE=1 VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1}
        export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} OMP_WAIT_POLICY=PASSIVE
        ;;
    gpu)
        HARDWARE_SUFFIX=_gpu
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

# start_run RUN_DIR COMMAND...: under the launcher; with DRY_RUN=1 the command checks its config and files, and ends
start_run() {
    local run_dir=$1
    shift
    case "${DRY_RUN:-0}" in
    0) exec python scripts/launch.py "$run_dir" -- "$@" ;;
    *) exec "$@" ;;
    esac
}
