#!/usr/bin/env bash
# Evaluates a checkpoint on Countdown's held-out problems: bash scripts/eval-countdown.sh EXPERIMENT_NAME [--step N] [--n 8]
# Writes outputs/results/EXPERIMENT_NAME.log; python scripts/read_log.py a.log b.log makes one table of several.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
use_hardware "${HARDWARE:-cpu}"
[ $# -ge 1 ] || { sed -n 2,3p "$0" >&2; exit 2; }
exec python scripts/evaluate_countdown.py "$@"
