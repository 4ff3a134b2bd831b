#!/usr/bin/env bash
# Evaluates a checkpoint on a benchmark: bash scripts/eval.sh BENCHMARK EXPERIMENT_NAME [hydra overrides]
#   BENCHMARK   a benchmark of python -m recipe.common.menu evaluation, or several: [aime24,aime25]
#   overrides   n=8 step=N files=[...] temperature=0.6 top_p=0.95 top_k=20 max_tokens=8192 server.tensor_parallel=1 …
# A killed evaluation continues where it stopped. Samples and numbers go to outputs/results/EXPERIMENT_NAME/; python
# scripts/read_log.py outputs/results/*/step_*/*.log makes a table of several. HARDWARE=gpu (default) or cpu; TOOLS=none,
# local or web; DRY_RUN=1 checks model and data and prints the plan. All keys: recipe/common/config/evaluate.yaml.
set -euo pipefail
[ $# -ge 2 ] || { sed -n 2,7p "${BASH_SOURCE[0]}" >&2; exit 2; }
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
use_hardware "${HARDWARE:-gpu}"
benchmark=$1 experiment=$2
shift 2
run_python scripts/evaluate.py benchmark="$benchmark" experiment="$(quoted "$experiment")" tools="${TOOLS:-none}" "$@"
