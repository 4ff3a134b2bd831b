#!/usr/bin/env bash
# Checks, on a machine with GPUs and the GPU extra, what this project cannot check on a CPU: kernels, a warm start, two steps
# of every recipe, both of vLLM's model runners, an evaluation; with two GPUs, tensor and sequence parallelism and shards.
# Should take an hour, and at most two. Ends with a table; exit code 1 if a part failed.
#   [MODEL_PATH=a small model instead of the tiny one] bash scripts/check_gpu/check_gpu.sh [PART...]
# Logs: outputs/check_gpu/PART.log. DRY_RUN=1 composes and checks every part's config, without a GPU, and starts nothing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/environment.sh
use_hardware gpu
exec python scripts/check_gpu/check_gpu.py "$@"
