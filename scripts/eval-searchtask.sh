#!/usr/bin/env bash
# Evaluates an agent on the synthetic search task: bash scripts/eval-searchtask.sh EXPERIMENT_NAME [hydra overrides]
# Samples and calls tools as the trainer's validation does. HARDWARE: by default the run's; DATA_DIR: of the data;
# HOPS=3, or 3-5, as in training: searches that a question needs; ENVIRONMENT=chat, as in training. See scripts/eval.sh.
set -euo pipefail
[ $# -ge 1 ] || { sed -n 2,4p "${BASH_SOURCE[0]}" >&2; exit 2; }
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/run_profile.sh
profile=$(profile_of "$1")
export HARDWARE=${HARDWARE:-$profile} TOOLS=${TOOLS:-local}
source recipe/tasks/search/search_task.sh
use_hops "${HOPS:-2}"
use_environment "${ENVIRONMENT:-tools}"
data=${DATA_DIR:-outputs/data/$TASK_NAME}
experiment=$1
shift
exec bash scripts/eval.sh searchtask "$experiment" files="[$(quoted "$data/test.parquet")]" \
    temperature=1.0 top_p=1.0 top_k=-1 max_tokens="$MAX_RESPONSE_LENGTH" tools.call_limit="$CALL_LIMIT" tools.timeout=10 \
    "++tools.tool_instances.search.params={corpus: $(quoted "$data/corpus.jsonl"), max_results: 1}" "$@"
