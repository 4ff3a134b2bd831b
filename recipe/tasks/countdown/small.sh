# Countdown for recipe/common/small_tasks.sh: small problems for the tiny model, larger ones for a pretrained model on GPUs.
VAL_SPLIT=test WARM_START=warm_start TINY_MODEL=tiny_model

make_data() {
    local sizes=()
    if [ "$1" = gpu ]; then
        sizes=(--min-numbers 3 --max-numbers 4 --max-number 99 --operators "+-*/" --max-target 99 --style long)
        sizes+=(--train-size 50000 --test-size 512)
    fi
    python -m recipe.tasks.countdown.data --output-dir "$2" ${sizes[@]+"${sizes[@]}"}
}

make_tiny_model() {
    python -m recipe.common.tiny_model --output-dir "$1"
}
