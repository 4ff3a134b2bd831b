#!/usr/bin/env bash
# Evaluates a checkpoint on Countdown's held-out problems: bash scripts/eval-countdown.sh EXPERIMENT_NAME [hydra overrides]
# Samples as the trainer's validation does. HARDWARE: by default the run's; DATA_DIR: of the data. See scripts/eval.sh.
set -euo pipefail
[ $# -ge 1 ] || { sed -n 2,3p "${BASH_SOURCE[0]}" >&2; exit 2; }
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/run_profile.sh
profile=$(profile_of "$1")
export HARDWARE=${HARDWARE:-$profile}
[ "$profile" = cpu ] && tokens=12 data=outputs/data/countdown || tokens=1024 data=outputs/data/countdown_gpu
experiment=$1
shift
exec bash scripts/eval.sh countdown "$experiment" \
    files="[$(quoted "${DATA_DIR:-$data}/test.parquet")]" temperature=1.0 top_p=1.0 top_k=-1 max_tokens=$tokens "$@"
