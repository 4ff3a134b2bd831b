#!/usr/bin/env bash
# Evaluates a checkpoint on MBPP: bash scripts/eval-mbpp.sh EXPERIMENT_NAME [hydra overrides]; see scripts/eval.sh
exec bash "$(dirname "${BASH_SOURCE[0]}")/eval.sh" mbpp "$@"
