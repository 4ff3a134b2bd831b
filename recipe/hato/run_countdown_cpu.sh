#!/usr/bin/env bash
# HATO on Countdown, or TASK=walk, with a tiny model, on a laptop: bash recipe/hato/run_countdown_cpu.sh [hydra overrides]
# On Countdown the model answers in eight tokens without paragraphs, `<answer>7+3` and `-4</answer>`: two steps of four
# tokens. A step of a number walk is a line.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
case "${TASK:-countdown}" in
walk) STEPS=($'hato.tree.step_delimiter="\n"' hato.tree.max_step_tokens=8 hato.tree.max_depth=4 hato.tree.branching_factor=2) ;;
*) STEPS=(hato.tree.max_step_tokens=4 hato.tree.max_depth=2 hato.tree.branching_factor=4) ;;
esac
CONFIG_DIR=recipe/hato/config METHOD=hato HARDWARE=cpu exec bash recipe/common/run_countdown.sh update=tree "${STEPS[@]}" "$@"
