#!/usr/bin/env bash
# Evaluates a checkpoint on every benchmark whose files are there: bash scripts/eval-all.sh EXPERIMENT_NAME [hydra overrides]
# Mathematics first, then questions with search and Python (TOOLS=web, local or none); judge.url=... for those that a judge
# scores. See scripts/eval.sh.
set -euo pipefail
eval="$(dirname "${BASH_SOURCE[0]}")/eval.sh"
TOOLS=none bash "$eval" "[aime24,aime25,math500,gsm8k,math,amc23,olympiadbench]" "$@" skip_missing=true
TOOLS=${TOOLS:-web} bash "$eval" "[webwalkerqa,hotpotqa,2wikimultihopqa,musique,bamboogle,gaia,hle,xbench]" "$@" skip_missing=true
