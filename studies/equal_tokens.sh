#!/usr/bin/env bash
# The comparison of studies/design.md: bash studies/equal_tokens.sh walk|reasoning_gym
# It first makes data and a warm start, in four minutes. DRY_RUN=1 then only checks methods and prints the hours. End it by
# SIGTERM at any time; the same command goes on.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
use_hardware cpu
renice -n 19 $$ >/dev/null
export TASK=${1:?walk or reasoning_gym}
export DATA_DIR=outputs/data/equal_tokens_$TASK EXPERIMENT_NAME=equal_tokens_${TASK}_warm_start
case "$TASK" in
walk)
    DRY_RUN=0 make_once "$DATA_DIR/train.parquet" python -m recipe.tasks.walk.data --output-dir "$DATA_DIR" --train-size 2000 \
        --valid-size 500 --test-size 0 --max-start 40 --max-operand 3 --min-steps 3 --max-steps 4 --max-share 0.2
    methods=(grpo grpo-n4 dapo band hapo treepo hato latr tree_gain) design=(--tokens 200000 --rates 5e-5,1e-4,2e-4)
    ;;
reasoning_gym) methods=(grpo grpo-n4 dapo band treepo) design=(--tokens 200000 --rates 1e-4,2e-4) ;;
*)
    echo "error: $TASK: choose walk or reasoning_gym" >&2
    exit 2
    ;;
esac
DRY_RUN=0 make_once "outputs/$EXPERIMENT_NAME/huggingface" bash recipe/common/run_warm_start.sh
export MODEL_PATH=outputs/$EXPERIMENT_NAME/huggingface
unset EXPERIMENT_NAME
run_python -m recipe.common.compare --name "equal_tokens_$TASK" --task "$TASK" --output studies/results \
    --methods "${methods[@]}" "${design[@]}" --seeds 0,1,2,3,4,5,6,7,8,9 --least-gain 0.05 --validations 6 --seconds 260 \
    --overrides actor_rollout_ref.rollout.val_kwargs.n=1
