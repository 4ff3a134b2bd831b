#!/usr/bin/env bash
# Evaluates a checkpoint on the word problems of the test file: bash scripts/eval-wordproblems.sh EXPERIMENT_NAME [hydra overrides]
# Samples as the validation of recipe/common/run_smollm2.sh does. HARDWARE: by default the run's; DATA_DIR: of the data. See
# scripts/eval.sh.
set -euo pipefail
[ $# -ge 1 ] || { sed -n 2,4p "${BASH_SOURCE[0]}" >&2; exit 2; }
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/run_profile.sh
profile=$(profile_of "$1")
export HARDWARE=${HARDWARE:-$profile}
experiment=$1
shift
exec bash scripts/eval.sh wordproblems "$experiment" \
    files="[$(quoted "${DATA_DIR:-outputs/data/word_problems}/test.parquet")]" temperature=0.7 top_p=1.0 top_k=-1 max_tokens=64 "$@"
