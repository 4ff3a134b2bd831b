# The scripts that evaluate our own tasks source this file in the repository's root.

source scripts/quoted.sh

# profile_of EXPERIMENT: prints the hardware profile (cpu or gpu) with which the run in outputs/ was trained, which decides
# its task's data and lengths; HARDWARE, by default cpu, for a model that was trained elsewhere
profile_of() {
    local configs=(outputs/"$1"/global_step_*/config.yaml)
    case "$(grep -hE '^  device: ' "${configs[@]}" 2>/dev/null || echo "$1")" in
    *cuda* | *_gpu | *_gpu_*) echo gpu ;;
    *device:*) echo cpu ;;
    *) echo "${HARDWARE:-cpu}" ;;
    esac
}
