#!/usr/bin/env bash
# GRPO with lookahead-tree rollouts on Countdown, or TASK=walk, with a tiny model, on a laptop:
#   bash recipe/latr/run_countdown_cpu.sh [hydra overrides]        rollout.name=vllm: plain sampling, all else equal
# On Countdown the model answers in 12 tokens: branches are compared after 3 and 5, and asked for all at once. It is surer
# of its tokens than a 3B model: at the paper's thresholds (0.25, 0.15) a trained one's trees keep 2 branches of 8. Number
# walks are compared after a line and after two; at these thresholds the trees of a warm start keep 8 of 8.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export CONFIG_DIR=recipe/latr/config METHOD=grpo_countdown HARDWARE=cpu TASK=${TASK:-countdown}
export EXPERIMENT_NAME=${EXPERIMENT_NAME:-latr_grpo_${TASK}_seed${SEED:-0}}
case "$TASK" in
walk) COMPARED="[6,12]" ABSOLUTE=0.1 RELATIVE=0.5 CHUNK=18 ;;
*) COMPARED="[3,5]" ABSOLUTE=0.05 RELATIVE=0.8 CHUNK=12 ;;
esac
exec bash recipe/common/run_countdown.sh \
    update=tree \
    actor_rollout_ref.actor.use_kl_loss=false \
    actor_rollout_ref.rollout.kt.rollout_filter_steps="$COMPARED" \
    actor_rollout_ref.rollout.kt.prob_filter_abs_thres=$ABSOLUTE \
    actor_rollout_ref.rollout.kt.prob_filter_rel_thres=$RELATIVE \
    actor_rollout_ref.rollout.kt.chunk_size=$CHUNK \
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0 \
    actor_rollout_ref.rollout.val_kwargs.top_p=1.0 \
    actor_rollout_ref.rollout.val_kwargs.top_k=-1 \
    "$@"
