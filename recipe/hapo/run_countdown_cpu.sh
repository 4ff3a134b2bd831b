#!/usr/bin/env bash
# HAPO on Countdown with the tiny model, on a laptop: bash recipe/hapo/run_countdown_cpu.sh [hydra overrides]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
CONFIG_DIR=recipe/hapo/config METHOD=hapo HARDWARE=cpu exec bash recipe/common/run_countdown.sh "$@"
