#!/usr/bin/env bash
# Trains and evaluates models on a laptop without a GPU, from nothing: set-up, tiny model, data, warm start, GRPO, a
# recipe with the same seed, evaluation, table, curves, and a page with the recipe's trees.
#   [RECIPE=hato|latr|hapo|arpo] [STEPS=40] [SEED=0] bash scripts/quickstart.sh
# The task of hato, latr and hapo is Countdown; that of arpo is to search and compute. Results of an earlier quick start
# are used. Trees are kept every ten steps; hapo grows none.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

RECIPE=${RECIPE:-hato}
SEED=${SEED:-0}
STEPS=${STEPS:-40}
results=outputs/results/quickstart_$RECIPE
case "$RECIPE" in
hato | latr | hapo)
    task=countdown warm=warm_start warm_script=recipe/common/run_warm_start.sh
    # tree=plain is GRPO; its update computes a prompt once for its eight answers, as those of hato and latr do
    grpo_script="recipe/common/run_explore.sh update=tree" recipe_script=recipe/$RECIPE/run_countdown_cpu.sh
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
unset RUN_DIR EXPERIMENT_NAME MODEL_PATH DATA_DIR TASK TOOLS HOPS ENVIRONMENT DRY_RUN NNODES RAY_ADDRESS LORA_RANK
unset CONFIG_DIR CONFIG_NAME
bash scripts/setup.sh
# not another environment that is active; forks keep their Python at the head of PATH
[ -n "${FORK_SERVER:-}" ] || source .venv/bin/activate
source scripts/environment.sh
use_hardware cpu
# every Python process below is a fork of one that has made the imports
[ -n "${FORK_SERVER:-}" ] || exec python scripts/fork_server/fork_server.py bash scripts/quickstart.sh
began=$SECONDS

# part WHAT: tells how long the part before it took, and what begins
part() {
    [ -z "${part_began:-}" ] || echo "   $((SECONDS - part_began)) s"
    part_began=$SECONDS
    echo "== $1"
}

# beside LOG COMMAND...: starts the command beside the others, with its output in a file
declare -A processes
beside() {
    mkdir -p "$(dirname "$1")"
    "${@:2}" >"$1" 2>&1 &
    processes[$1]=$!
}

# await LOG: waits until a command has ended, and fails if it has failed. A terminal shows the log's last line meanwhile,
# which is the progress bar, and is rid of it in the end.
await() {
    if [ -t 1 ]; then
        while kill -0 "${processes[$1]}" 2>/dev/null; do
            line=$(tail -c 400 "$1" 2>/dev/null | tr '\r' '\n' | grep -a . | tail -n 1 || true)
            printf '\r\033[K%s' "${line:0:$(($(tput cols 2>/dev/null || echo 80) - 1))}"
            sleep 0.5
        done
        printf '\r\033[K'
    fi
    wait "${processes[$1]}" || {
        tail -n 20 "$1" >&2
        echo "error: this command failed; its whole output is in $1" >&2
        exit 1
    }
    unset "processes[$1]"
}
trap 'kill "${processes[@]}" 2>/dev/null || true' EXIT

# train METHOD SCRIPT [OVERRIDE...]: trains in the folder of the method's run, in place of the shell that calls it
train() {
    local run=${runs[$1]}
    [ ! -f "outputs/$run/global_step_$STEPS/COMPLETE" ] || exit 0
    METHOD=$1 SEED=$SEED EXPERIMENT_NAME=$run exec bash "${@:2}" actor_rollout_ref.actor.ppo_mini_batch_size=8 \
        trainer.total_training_steps="$STEPS" trainer.test_freq=-1 trainer.val_before_train=false \
        trainer.save_freq="$STEPS"
}

declare -A runs
for method in grpo "$RECIPE"; do
    runs[$method]=quickstart_${method}_${task}_${STEPS}steps_seed$SEED
done
grpo=${runs[grpo]} run=${runs[$RECIPE]}

if [ ! -d outputs/$warm/huggingface ]; then
    part "data, tiny model and warm start"
    beside outputs/$warm/progress.log bash $warm_script
    await outputs/$warm/progress.log
fi
part "$STEPS steps, two updates each: grpo and $RECIPE side by side"
beside "outputs/$grpo/progress.log" train grpo $grpo_script
beside "outputs/$run/progress.log" train "$RECIPE" $recipe_script
await "outputs/$grpo/progress.log"
await "outputs/$run/progress.log"
part "evaluation of the three models"
beside "outputs/$warm/eval.log" bash scripts/eval-$task.sh $warm model=outputs/$warm/huggingface
beside "outputs/$grpo/eval.log" bash scripts/eval-$task.sh "$grpo" step="$STEPS"
beside "outputs/$run/eval.log" bash scripts/eval-$task.sh "$run" step="$STEPS"
for model in "$warm" "$grpo" "$run"; do
    await "outputs/$model/eval.log"
done

part "table, curves, trees"
evaluated=(outputs/results/$warm/$task.log outputs/results/{"$grpo","$run"}/"step_$STEPS/$task.log")
python scripts/read_log.py "${evaluated[@]}" --output "$results.csv" >/dev/null
python scripts/plot_run.py "outputs/$grpo" "outputs/$run" --labels "GRPO,${RECIPE^^}" \
    --output "${results}_curves.png" >/dev/null
if [ -d "outputs/$run/trees" ]; then
    page=$(python scripts/view_trees.py "outputs/$run" | tail -1)
fi
table=$(python -m recipe.common.reporting.score_and_cost --model "warm start" "${evaluated[0]}" outputs/$warm \
    --model GRPO "${evaluated[1]}" "outputs/$grpo" --model "${RECIPE^^}" "${evaluated[2]}" "outputs/$run")
echo "   $((SECONDS - part_began)) s"
cat <<END

$table

Both runs shared this machine's cores. The quick start took $((SECONDS - began)) s after the set-up.

accuracies:  $results.md
curves:      ${results}_curves.png
trees:       ${page:-$RECIPE grows none; RECIPE=latr bash scripts/quickstart.sh does}

What to do next:
  SEED=1 bash scripts/quickstart.sh                             the same with another seed
  bash recipe/common/run_explore.sh recipe=hapo tree=latr       parts of several methods in a run
  python -m recipe.common.menu                                  all parts and recipes, after: source .venv/bin/activate
  docs/math_reward.md, docs/train.md                            your data and model
The models are in outputs/{$grpo,$run}/global_step_$STEPS/actor/huggingface.
END
