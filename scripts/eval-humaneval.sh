#!/usr/bin/env bash
# Evaluates a checkpoint on HumanEval: bash scripts/eval-humaneval.sh EXPERIMENT_NAME [hydra overrides]; see scripts/eval.sh
exec bash "$(dirname "${BASH_SOURCE[0]}")/eval.sh" humaneval "$@"
