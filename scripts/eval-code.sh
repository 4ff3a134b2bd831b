#!/usr/bin/env bash
# Evaluates a checkpoint on the code task's test file: bash scripts/eval-code.sh EXPERIMENT_NAME [hydra overrides]; see scripts/eval.sh
exec bash "$(dirname "${BASH_SOURCE[0]}")/eval.sh" code "$@"
