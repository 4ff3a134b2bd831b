#!/usr/bin/env bash
# LATR's trees with credit for each token of the tree and HAPO's loss; SmolLM2-135M-Instruct on word problems, on a laptop:
#   bash recipe/common/run_smollm2_combination_cpu.sh [hydra overrides]
# The tree's settings are those of recipe/latr/run_smollm2_cpu.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
METHOD=combination exec bash recipe/common/run_smollm2_cpu.sh tree=latr credit=tree_gain loss=hapo \
    "actor_rollout_ref.rollout.kt.rollout_filter_steps=[10,20,40]" \
    actor_rollout_ref.rollout.kt.prob_filter_abs_thres=0.15 \
    actor_rollout_ref.rollout.kt.prob_filter_rel_thres=0.3 \
    "$@"
