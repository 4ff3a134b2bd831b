# Text games for recipe/common/small_tasks.sh: two rooms and quests of one or two commands, for the tiny model; larger ones, in
# richer words, for a pretrained model on GPUs. The environment is chosen here, as the scripts' own configs have none.
VAL_SPLIT=test WARM_START=warm_start_textworld TINY_MODEL=textworld_model
TASK_OPTIONS=(environment=gym)
if [ "${CONFIG_DIR:-}" = recipe/common/config ] && [ -z "${CONFIG_NAME:-}" ]; then
    echo "error: TASK=textworld needs environment=gym, which this script's config does not have: take" \
        "recipe/common/run_explore.sh" >&2
    exit 2
fi
if [ "$HARDWARE" = cpu ]; then
    # rows are padded to these lengths on CPU
    TASK_OPTIONS+=(data.max_prompt_length=160 data.max_response_length=224)
    TASK_OPTIONS+=(environment.max_steps=6 environment.max_observation_tokens=96)
    TASK_OPTIONS+=(data.train_batch_size=8 actor_rollout_ref.actor.ppo_mini_batch_size=8 actor_rollout_ref.actor.optim.lr=2e-4)
    WARM_START_OPTIONS=(optim.lr=2e-3 data.max_length=1024 trainer.total_epochs=6)
fi

make_data() {
    local sizes=()
    if [ "$1" = gpu ]; then
        sizes=(--theme house --rooms 5 --objects 8 --min-quest 3 --max-quest 6 --train-size 2000 --test-size 128 --demo-size 2000)
    fi
    python -m recipe.tasks.textworld.data --output-dir "$2" ${sizes[@]+"${sizes[@]}"}
}

make_tiny_model() {
    python -m recipe.tasks.textworld.data --model-dir "$1"
}
