#!/usr/bin/env bash
# Countdown's data for a hardware profile, small problems for the tiny model or larger ones for a pretrained one:
#   bash recipe/common/make_countdown_data.sh cpu|gpu OUTPUT_DIR
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/environment.sh

use_hardware "${1:?}"
SIZES=()
if [ "$1" = gpu ]; then
    SIZES=(--min-numbers 3 --max-numbers 4 --max-number 99 --operators "+-*/" --max-target 99 --style long)
    SIZES+=(--train-size 50000 --test-size 512)
fi
exec python -m recipe.tasks.countdown.data --output-dir "${2:?}" ${SIZES[@]+"${SIZES[@]}"}
