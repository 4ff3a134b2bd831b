#!/usr/bin/env bash
# LATR's trees with credit for each token of the tree and HAPO's loss; SmolLM2-135M-Instruct on word problems, on a laptop:
#   bash recipe/common/run_smollm2_combination_cpu.sh [hydra overrides]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
METHOD=combination exec bash recipe/common/run_smollm2_cpu.sh tree=latr credit=tree_gain loss=hapo "$@"
