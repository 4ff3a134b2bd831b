#!/usr/bin/env bash
# HATO on Countdown with the tiny model, on a laptop: bash recipe/hato/run_countdown_cpu.sh [hydra overrides]
# The model answers in eight tokens without paragraphs, `<answer>7+3` and `-4</answer>`: two steps of four tokens.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
CONFIG_DIR=recipe/hato/config METHOD=hato HARDWARE=cpu exec bash recipe/common/run_countdown.sh \
    update=tree \
    hato.tree.max_step_tokens=4 \
    hato.tree.max_depth=2 \
    hato.tree.branching_factor=4 \
    "$@"
