#!/usr/bin/env bash
# Writes a checkpoint as a folder that transformers, vLLM and llama.cpp's converter read: bash scripts/export.sh RUN [STEP] FOLDER
#   RUN     a run's folder, or its name under outputs/
#   STEP    the checkpoint's step; default: the last complete one
#   FOLDER  the new folder: config, tokenizer, weights (FSDP's shards and LoRA merged)
#   --adapter  as a further argument: LoRA's factors alone, in PEFT's format, to serve them or to start another run from
set -euo pipefail
[ $# -ge 2 ] || { sed -n 2,6p "${BASH_SOURCE[0]}" >&2; exit 2; }
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
# the weights are merged on the CPU, whatever the run was trained on
use_hardware cpu
exec python scripts/export.py "$@"
