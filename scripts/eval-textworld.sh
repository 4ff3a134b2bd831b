#!/usr/bin/env bash
# Evaluates a player of text games on the test games: bash scripts/eval-textworld.sh EXPERIMENT_NAME [hydra overrides]
# Samples as the trainer's validation does; the score is the game's reward. HARDWARE: by default the run's; DATA_DIR: of the
# data. See scripts/eval.sh.
set -euo pipefail
[ $# -ge 1 ] || { sed -n 2,4p "${BASH_SOURCE[0]}" >&2; exit 2; }
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/run_profile.sh
profile=$(profile_of "$1")
export HARDWARE=${HARDWARE:-$profile}
limits=(max_tokens=2048 environment.max_steps=10 environment.max_observation_tokens=256) data=outputs/data/textworld_gpu
if [ "$profile" = cpu ]; then
    limits=(max_tokens=224 environment.max_steps=6 environment.max_observation_tokens=96) data=outputs/data/textworld
fi
experiment=$1
shift
exec bash scripts/eval.sh textworld "$experiment" files="[$(quoted "${DATA_DIR:-$data}/test.parquet")]" \
    environment=gym environment.class_path=recipe.tasks.textworld.environment.TextWorld "${limits[@]}" \
    temperature=1.0 top_p=1.0 top_k=-1 "$@"
