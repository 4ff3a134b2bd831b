#!/usr/bin/env bash
# The number walk's data for a hardware profile, short prompts for the tiny model or long ones for a pretrained one:
#   bash recipe/common/make_walk_data.sh cpu|gpu OUTPUT_DIR
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/environment.sh

use_hardware "${1:?}"
SIZES=()
if [ "$1" = gpu ]; then
    SIZES=(--min-steps 4 --max-steps 8 --operators "+*-/" --max-start 99 --max-operand 20 --max-factor 5 --limit 999
        --style long)
    SIZES+=(--train-size 20000 --valid-size 256 --test-size 512 --demo-correct 1)
fi
exec python -m recipe.tasks.walk.data --output-dir "${2:?}" ${SIZES[@]+"${SIZES[@]}"}
