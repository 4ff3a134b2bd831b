#!/usr/bin/env bash
# Compares methods: each is trained from the same warm start with every seed, and one table and one picture say which
# learns fastest at equal steps, generated tokens and seconds, with intervals of differences that are paired by seed.
#   [TASK=walk] [SEEDS=0,1,2] [STEPS=60] [JOBS=2] [NAME=compare] [OUTPUT=outputs/compare]
#       bash recipe/common/run_compare.sh grpo dapo passk treepo "mine: tree=eptree credit=treerl loss=hapo"
# Differences are to the first method. A method is a name of recipe/common/compare_runs.py (grpo, dapo, hapo, latr, hato,
# …); the name of parts, which are chosen together (treepo is tree=treepo credit=treepo); or "NAME: HYDRA OVERRIDES".
# TASK: walk, countdown, word_problems (SmolLM2) or search_task (HOPS=2). OVERRIDES="key=value …" are for every method.
# DRY_RUN=1 checks each method and starts nothing. A run that has ended is not repeated.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/environment.sh
if [ $# = 0 ]; then
    echo "error: name the methods to compare, such as: bash recipe/common/run_compare.sh grpo passk hapo" >&2
    exit 2
fi
use_hardware cpu
read -rd "" -a more <<<"${OVERRIDES:-}" || true # 1 at the end of the text
run_python -m recipe.common.compare --task "${TASK:-walk}" --seeds "${SEEDS:-0,1,2}" --steps "${STEPS:-60}" \
    --jobs "${JOBS:-2}" --name "${NAME:-compare}" --output "${OUTPUT:-outputs/compare}" \
    --overrides ${more[@]+"${more[@]}"} --methods "$@"
