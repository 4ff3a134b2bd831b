# reasoning-gym for recipe/common/small_tasks.sh: words to spell backward for the tiny model, instructions for a pretrained model on GPUs.
# FAMILIES and FAMILY_CONFIG are the options of recipe.tasks.reasoning_gym.data, for data that are not there yet.
VAL_SPLIT=test WARM_START=warm_start_reasoning_gym TINY_MODEL=reasoning_gym_model
if [ "$HARDWARE" = cpu ]; then
    # rows are padded to these lengths on CPU
    TASK_OPTIONS=(data.max_prompt_length=28 data.max_response_length=16)
    TASK_OPTIONS+=(actor_rollout_ref.actor.optim.lr=2e-4 actor_rollout_ref.actor.optim.lr_scheduler_type=cosine)
    WARM_START_OPTIONS=(optim.lr=2e-3)
fi

make_data() {
    local options=()
    [ -z "${FAMILIES:-}" ] || options+=(--families "$FAMILIES" --family-config "${FAMILY_CONFIG:-}")
    [ "$1" = cpu ] || options+=(--style long --train-size 20000 --demo-correct 1)
    python -m recipe.tasks.reasoning_gym.data --output-dir "$2" ${options[@]+"${options[@]}"}
}

make_tiny_model() {
    python -m recipe.tasks.reasoning_gym.data --model-dir "$1"
}
