#!/usr/bin/env bash
# Evaluates a checkpoint on the test problems of reasoning-gym, all and by family: bash scripts/eval-reasoning-gym.sh
# EXPERIMENT_NAME [hydra overrides]. Samples as the trainer's validation does. HARDWARE: by default the run's; DATA_DIR: of
# the data. See scripts/eval.sh.
set -euo pipefail
[ $# -ge 1 ] || { sed -n 2,4p "${BASH_SOURCE[0]}" >&2; exit 2; }
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/run_profile.sh
profile=$(profile_of "$1")
export HARDWARE=${HARDWARE:-$profile}
[ "$profile" = cpu ] && tokens=48 data=outputs/data/reasoning_gym || tokens=2048 data=outputs/data/reasoning_gym_gpu
experiment=$1 file=${DATA_DIR:-$data}/test.parquet
shift
log=$(mktemp)
trap 'rm -f "$log"' EXIT
bash scripts/eval.sh reasoninggym "$experiment" \
    files="[$(quoted "$file")]" temperature=1.0 top_p=1.0 top_k=-1 max_tokens=$tokens "$@" | tee "$log"
[ "${DRY_RUN:-0}" = 0 ] || exit 0
source scripts/environment.sh
python -m recipe.tasks.reasoning_gym.evaluation "$(sed -n 's/^[0-9]* samples: \(.*\)   log: .*/\1/p' "$log")"
