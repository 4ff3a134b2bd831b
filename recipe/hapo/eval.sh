#!/usr/bin/env bash
# Evaluates a checkpoint with HAPO's settings (T 0.5, top-p 0.7, 8 samples): merges it where needed, generates, scores.
#   bash recipe/hapo/eval.sh EXPERIMENT_NAME [options of scripts/eval-math.sh]
#   HARDWARE=cpu DATA=outputs/data/countdown/test.parquet bash recipe/hapo/eval.sh hapo_countdown_seed0
# DATA: parquet files, separated by spaces. HARDWARE=gpu (default) or cpu. DRY_RUN=1 checks the files and tells the plan.
set -euo pipefail
[ $# -ge 1 ] || { sed -n 2,5p "${BASH_SOURCE[0]}" >&2; exit 2; }
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
read -ra FILES <<<"${DATA:-}"
# as long as the run's own answers; the longest of the paper's models by default
[ "${HARDWARE:-gpu}" = cpu ] || set -- --max-tokens "${MAX_RESPONSE_LENGTH:-12288}" "$@"
exec bash scripts/eval-math.sh ${FILES:+--data "${FILES[@]}"} --n 8 --temperature 0.5 --top-p 0.7 --top-k -1 "$@"
