# The scripts source this file after scripts/environment.sh. Countdown and the number walk are the tasks that a model of a
# million parameters learns on a laptop, and a pretrained model on GPUs.

# use_task countdown|walk: sets TASK; VAL_SPLIT, the file that a run validates on; WARM_START and TINY_MODEL, names of
# folders under outputs/; TASK_OPTIONS and WARM_START_OPTIONS, Hydra overrides; all for the HARDWARE.
# make_tiny_model DIR makes the task's model.
use_task() {
    TASK=$1 TASK_OPTIONS=() WARM_START_OPTIONS=()
    case "$TASK" in
    countdown)
        VAL_SPLIT=test WARM_START=warm_start TINY_MODEL=tiny_model
        ;;
    walk)
        VAL_SPLIT=valid WARM_START=warm_start_walk TINY_MODEL=walk_model
        # rows are padded to these lengths on CPU: six lines of six tokens
        if [ "$HARDWARE" = cpu ]; then
            TASK_OPTIONS=(data.max_prompt_length=24 data.max_response_length=40)
            # at Countdown's constant 5e-4 its answers get worse (studies/results/number_walk.md)
            TASK_OPTIONS+=(actor_rollout_ref.actor.optim.lr=2e-4 actor_rollout_ref.actor.optim.lr_scheduler_type=cosine)
            WARM_START_OPTIONS=(optim.lr=2e-3)
        fi
        ;;
    *)
        echo "error: TASK=$TASK: choose countdown or walk" >&2
        exit 2
        ;;
    esac
}

make_tiny_model() {
    case "$TASK" in
    countdown) python -m recipe.common.tiny_model --output-dir "$1" ;;
    walk) python -m recipe.tasks.walk.data --model-dir "$1" ;;
    esac
}
