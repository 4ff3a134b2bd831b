#!/usr/bin/env bash
# HATO with SmolLM2-135M-Instruct on word problems, on a laptop: bash recipe/hato/run_smollm2_cpu.sh [hydra overrides]
# A step is a sentence, as the model writes no paragraphs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
CONFIG_DIR=recipe/hato/config METHOD=hato exec bash recipe/common/run_smollm2.sh \
    hato.tree.step_delimiter=. \
    hato.tree.max_step_tokens=24 \
    hato.tree.max_depth=3 \
    hato.tree.branching_factor=3 \
    'actor_rollout_ref.rollout.temperature=${hato.exploration.initial_temperature}' \
    hato.exploration.initial_temperature=0.7 \
    "$@"
