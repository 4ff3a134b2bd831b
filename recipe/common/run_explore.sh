#!/usr/bin/env bash
# Countdown with parts of your choice (recipe/common/config/parts.yaml lists them), with a recipe's values, or both:
#   bash recipe/common/run_explore.sh tree=latr sampler=tempered credit=tree_gain loss=hapo [hydra overrides]
#   bash recipe/common/run_explore.sh recipe=hapo tree=latr [hydra overrides]
# HARDWARE=cpu|gpu and what else recipe/common/run_countdown.sh reads. DRY_RUN=1 checks the combination and tells the plan.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
CONFIG_NAME=explore METHOD=explore exec bash recipe/common/run_countdown.sh "$@"
