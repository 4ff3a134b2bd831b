#!/usr/bin/env bash
# GRPO with SmolLM2-135M-Instruct on word problems, on a laptop: bash recipe/common/run_smollm2_cpu.sh [hydra overrides]
# Parts of your choice (recipe/common/config/parts.yaml) make another method, which METHOD names:
#   METHOD=eptree bash recipe/common/run_smollm2_cpu.sh tree=eptree credit=treerl
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
CONFIG_NAME=explore METHOD=${METHOD:-grpo} exec bash recipe/common/run_smollm2.sh "$@"
