#!/usr/bin/env bash
# What exploration finds with a model on a task, before any training: bash scripts/explore.sh MODEL DATA [hydra overrides]
#   MODEL       a folder or a name on the Hugging Face hub; of a run: outputs/NAME/global_step_N/actor/huggingface
#   DATA        a parquet file in verl's format
#   overrides   prompts=64 n=8 seed=0 temperatures=[0.7,1.0] data.max_response_length=512 task=math …
# Plain sampling and every tree policy on one vLLM engine: a table, and thresholds that fit the model, under
# outputs/results/. HARDWARE=cpu (default) or gpu; DRY_RUN=1 checks model and data, prints the plan and starts nothing. All
# keys: recipe/common/config/diagnosis.yaml.
set -euo pipefail
[ $# -ge 2 ] || { sed -n 2,8p "${BASH_SOURCE[0]}" >&2; exit 2; }
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
export HARDWARE=${HARDWARE:-cpu}
use_hardware "$HARDWARE"
export VLLM_LOGGING_LEVEL=${VLLM_LOGGING_LEVEL:-ERROR} PYTHONWARNINGS=${PYTHONWARNINGS:-ignore}
run_python scripts/explore.py "$@"
