#!/usr/bin/env bash
# Evaluates a checkpoint on Countdown's held-out problems: bash scripts/eval-countdown.sh EXPERIMENT_NAME [--step N] [--n 8]
# Writes outputs/results/EXPERIMENT_NAME.log; python scripts/read_log.py a.log b.log makes one table of several.
# HARDWARE=cpu (default) or gpu; DRY_RUN=1 checks the files and tells the plan; all options: --help.
set -euo pipefail
[ $# -ge 1 ] || { sed -n 2,4p "${BASH_SOURCE[0]}" >&2; exit 2; }
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
use_hardware "${HARDWARE:-cpu}"
exec python scripts/evaluate.py --task countdown "$@"
