#!/usr/bin/env bash
# Evaluates a checkpoint on mathematics: bash scripts/eval-math.sh EXPERIMENT_NAME [--step N] [--n 8] [--tensor-parallel 1]
#   [--data outputs/data/math/{math500,amc23,olympiadbench}.parquet] [--temperature 0.6] [--top-p 0.95] [--top-k 20]
#   [--max-tokens 8192]
# Writes outputs/results/EXPERIMENT_NAME.log; python scripts/read_log.py a.log b.log makes one table of several.
# HARDWARE=gpu (default) or cpu; DRY_RUN=1 checks the files and tells the plan; all options: --help.
set -euo pipefail
[ $# -ge 1 ] || { sed -n 2,6p "${BASH_SOURCE[0]}" >&2; exit 2; }
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
use_hardware "${HARDWARE:-gpu}"
exec python scripts/evaluate.py --task math "$@"
