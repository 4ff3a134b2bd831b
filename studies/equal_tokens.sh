#!/usr/bin/env bash
# The comparison of studies/design.md: bash studies/equal_tokens.sh countdown|reasoning_gym
# It first makes data and a warm start, in four minutes. DRY_RUN=1 then only checks methods and prints the hours. End it by
# SIGTERM at any time; the same command goes on. JOBS: number of runs at a time.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
use_hardware cpu
renice -n "${NICE:-19}" $$ >/dev/null
export TASK=${1:?countdown or reasoning_gym}
export DATA_DIR=outputs/data/equal_tokens_$TASK EXPERIMENT_NAME=equal_tokens_${TASK}_warm_start
case "$TASK" in
countdown)
    # all problems that the tiny model's numbers have for a test: five responses each make 500 answers
    DRY_RUN=0 make_once "$DATA_DIR/train.parquet" python -m recipe.tasks.countdown.data --output-dir "$DATA_DIR" --test-size 100
    methods=(grpo grpo-n4 dapo band hapo treepo hato latr tree_gain)
    design=(--tokens 60000 --rates 1.5e-4,3e-4,6e-4 --seconds 180) answers=5
    ;;
reasoning_gym)
    methods=(grpo grpo-n4 dapo band treepo) design=(--tokens 40000 --rates 1e-4,3e-4,9e-4 --seconds 120) answers=1
    ;;
*)
    echo "error: $TASK: choose countdown or reasoning_gym" >&2
    exit 2
    ;;
esac
DRY_RUN=0 make_once "outputs/$EXPERIMENT_NAME/huggingface" bash recipe/common/run_warm_start.sh
export MODEL_PATH=outputs/$EXPERIMENT_NAME/huggingface
unset EXPERIMENT_NAME
run_python -m recipe.common.compare --name "equal_tokens_$TASK" --task "$TASK" --output studies/results \
    --methods "${methods[@]}" "${design[@]}" --seeds 0,1,2,3,4,5,6,7,8,9 --least-gain 0.05 --validations 6 \
    --jobs "${JOBS:-2}" --overrides actor_rollout_ref.rollout.val_kwargs.n=$answers \
    actor_rollout_ref.actor.ppo_mini_batch_size=8
