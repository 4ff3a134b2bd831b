#!/usr/bin/env bash
# HATO with the design notes' own values on Countdown, or TASK=walk, with a tiny model, on a laptop:
# bash recipe/hato/run_notes_countdown_cpu.sh [hydra overrides]
# The notes do not say where a step ends: as in run_countdown_cpu.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
case "${TASK:-countdown}" in
walk) STEPS=($'hato.tree.step_delimiter="\n"' hato.tree.max_step_tokens=8) ;;
*) STEPS=(hato.tree.max_step_tokens=4) ;;
esac
CONFIG_DIR=recipe/hato/config METHOD=hato_notes HARDWARE=cpu exec bash recipe/common/run_countdown.sh update=tree "${STEPS[@]}" "$@"
