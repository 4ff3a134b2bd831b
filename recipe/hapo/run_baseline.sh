#!/usr/bin/env bash
# The baselines of HAPO's paper at HAPO's own settings of data, model and batch:
#   BASELINE=dapo|forking|archer|edge MODEL=qwen2.5_math_7b bash recipe/hapo/run_baseline.sh [hydra overrides]
# dapo: clip 0.2/0.28; forking: DAPO on the 20 % of tokens with the highest entropy (80/20); archer; edge: EDGE-GRPO.
# MODEL: the name of a script run_MODEL.sh of this folder. What can be set by environment: recipe/common/run_math.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
BASELINE=${BASELINE:-dapo} MODEL=${MODEL:-qwen2.5_math_7b}
case "$BASELINE" in
dapo) PARTS=(credit=grpo loss=vanilla actor_rollout_ref.actor.clip_ratio_high=0.28 actor_rollout_ref.actor.clip_ratio_c=10) ;;
forking | archer) PARTS=(credit=grpo loss="$BASELINE") ;;
edge) PARTS=(credit=edge loss=vanilla actor_rollout_ref.actor.clip_ratio_c=10) ;;
*) echo "error: BASELINE=$BASELINE: choose dapo, forking, archer or edge" >&2 && exit 2 ;;
esac
export EXPERIMENT_NAME=${EXPERIMENT_NAME:-hapo_${BASELINE}_${MODEL}_seed${SEED:-0}}
exec bash "recipe/hapo/run_$MODEL.sh" sampler=plain "${PARTS[@]}" "$@"
