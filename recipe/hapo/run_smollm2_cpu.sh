#!/usr/bin/env bash
# HAPO with SmolLM2-135M-Instruct on word problems, on a laptop: bash recipe/hapo/run_smollm2_cpu.sh [hydra overrides]
# The tempered sampler needs temperature 1, and this model trains at 0.7: it is off.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
CONFIG_DIR=recipe/hapo/config METHOD=hapo exec bash recipe/common/run_smollm2.sh sampler=plain "$@"
