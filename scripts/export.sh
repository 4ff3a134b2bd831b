#!/usr/bin/env bash
# Writes a checkpoint as a folder that transformers and vLLM read: bash scripts/export.sh RUN [STEP] FOLDER
#   RUN     a run's folder, or its name under outputs/
#   STEP    the checkpoint's step; default: the last complete one
#   FOLDER  the new folder: config, tokenizer, weights (FSDP's shards and LoRA merged)
set -euo pipefail
[ $# -ge 2 ] || { sed -n 2,5p "${BASH_SOURCE[0]}" >&2; exit 2; }
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
# the weights are merged on the CPU, whatever the run was trained on
use_hardware cpu
exec python scripts/export.py "$@"
