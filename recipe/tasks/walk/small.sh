# The number walk for recipe/common/small_tasks.sh: short prompts for the tiny model, long ones for a pretrained model on GPUs.
VAL_SPLIT=valid WARM_START=warm_start_walk TINY_MODEL=walk_model
if [ "$HARDWARE" = cpu ]; then
    # rows are padded to these lengths on CPU: six lines of six tokens
    TASK_OPTIONS=(data.max_prompt_length=24 data.max_response_length=40)
    # at Countdown's constant 5e-4 its answers get worse (studies/results/number_walk.md)
    TASK_OPTIONS+=(actor_rollout_ref.actor.optim.lr=2e-4 actor_rollout_ref.actor.optim.lr_scheduler_type=cosine)
    WARM_START_OPTIONS=(optim.lr=2e-3)
fi

make_data() {
    local sizes=()
    if [ "$1" = gpu ]; then
        sizes=(--min-steps 4 --max-steps 8 --operators "+*-/" --max-start 99 --max-operand 20 --max-factor 5 --limit 999)
        sizes+=(--style long --train-size 20000 --valid-size 256 --test-size 512 --demo-correct 1)
    fi
    python -m recipe.tasks.walk.data --output-dir "$2" ${sizes[@]+"${sizes[@]}"}
}

make_tiny_model() {
    python -m recipe.tasks.walk.data --model-dir "$1"
}
