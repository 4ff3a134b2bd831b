#!/usr/bin/env bash
# Trains and evaluates models on a laptop without a GPU, from nothing: set-up, tiny model, data, warm start, GRPO, a
# recipe with the same seed, evaluation, table, bar chart, curves, and a page with the recipe's trees.
#   [RECIPE=hato|latr|hapo|arpo] [STEPS=20] [SEED=0] bash scripts/quickstart.sh
# The task of hato, latr and hapo is Countdown; that of arpo is to search and compute. Results of an earlier quick start
# are used. Trees are kept every ten steps; hapo grows none.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

RECIPE=${RECIPE:-hato}
SEED=${SEED:-0}
STEPS=${STEPS:-20}
results=outputs/results/quickstart_$RECIPE
case "$RECIPE" in
hato | latr | hapo)
    task=countdown warm=warm_start warm_script=recipe/common/run_warm_start.sh
    grpo_script=recipe/common/run_grpo_countdown.sh recipe_script=recipe/$RECIPE/run_countdown_cpu.sh
    ;;
arpo)
    task=searchtask warm=search_task_sft warm_script=recipe/arpo/run_search_task_sft_cpu.sh
    grpo_script=recipe/arpo/run_search_task_cpu.sh recipe_script=recipe/arpo/run_search_task_cpu.sh
    ;;
*)
    echo "error: RECIPE=$RECIPE: choose hato, latr, hapo or arpo" >&2
    exit 2
    ;;
esac
# the quick start is for a laptop, whatever the environment says for other runs
export HARDWARE=cpu
unset RUN_DIR EXPERIMENT_NAME MODEL_PATH DATA_DIR TOOLS DRY_RUN NNODES
bash scripts/setup.sh
source scripts/environment.sh
use_hardware cpu
began=$SECONDS

# train METHOD SCRIPT: trains in the folder outputs/$run
train() {
    run=quickstart_$1_${task}_${STEPS}steps_seed$SEED
    echo "== $1, $STEPS steps, two updates each"
    [ ! -f "outputs/$run/global_step_$STEPS/COMPLETE" ] || return 0
    METHOD=$1 SEED=$SEED EXPERIMENT_NAME=$run bash "$2" actor_rollout_ref.actor.ppo_mini_batch_size=8 \
        trainer.total_training_steps="$STEPS" trainer.test_freq=-1 trainer.val_before_train=false \
        trainer.save_freq="$STEPS"
}

# evaluate NAME [overrides]: in the background, with its output in outputs/NAME/eval.log
evaluations=() # process -> name
trap 'kill "${!evaluations[@]}" 2>/dev/null || true' EXIT
evaluate() {
    echo "== evaluation of $1"
    bash scripts/eval-$task.sh "$@" >"outputs/$1/eval.log" 2>&1 &
    evaluations[$!]=$1
}

[ -d outputs/$warm/huggingface ] || { echo "== warm start" && bash $warm_script; }
train grpo $grpo_script
grpo=$run
train "$RECIPE" "$recipe_script"
# all three at once: most of their time is the start of a server
evaluate $warm model=outputs/$warm/huggingface
evaluate "$grpo" step="$STEPS"
evaluate "$run" step="$STEPS"
for process in "${!evaluations[@]}"; do
    wait "$process" || { cat "outputs/${evaluations[$process]}/eval.log" >&2; exit 1; }
done
evaluations=()

python scripts/read_log.py outputs/results/$warm/$task.log outputs/results/{"$grpo","$run"}/"step_$STEPS/$task.log" \
    --output "$results.csv" >/dev/null
python scripts/plot_run.py "outputs/$grpo" "outputs/$run" --output "${results}_curves.png" >/dev/null
echo
cat "$results.md"
echo "$((SECONDS - began)) s after the set-up"
if [ -d "outputs/$run/trees" ]; then
    page=$(python scripts/view_trees.py "outputs/$run" | tail -1)
    echo "trees: $page"
fi
echo "table: $results.md   bar chart: $results.png   curves: ${results}_curves.png"
echo "models: outputs/{$grpo,$run}/global_step_$STEPS/actor/huggingface"
