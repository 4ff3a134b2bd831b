# The scripts source this file after scripts/environment.sh. A small task is one that a model of a million parameters learns
# on a laptop, and a pretrained model on GPUs. Its folder, recipe/tasks/NAME or the package of an entry point NAME, has a
# file small.sh, which sets
#   VAL_SPLIT                 name of the file, train or another split, that a run validates on
#   WARM_START  TINY_MODEL    names of folders under outputs/
#   TASK_OPTIONS  WARM_START_OPTIONS    Hydra overrides for the HARDWARE; arrays that are empty at first
# and defines make_data HARDWARE DIR, which makes train.parquet, sft.parquet and the split, and make_tiny_model DIR.

# list_beside: prints the name of each small task of other packages, a tab and its folder; it imports none of them
list_beside() {
    python -c '
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

for entry in entry_points(group="verl_exploration.parts"):
    module = find_spec(entry.value)
    for folder in module and module.submodule_search_locations or ():
        if Path(folder, "small.sh").is_file():
            print(entry.name, folder, sep="\t")'
}

# use_task NAME: sets TASK, and what the task's small.sh sets
use_task() {
    TASK=$1 TASK_OPTIONS=() WARM_START_OPTIONS=()
    local name folder=recipe/tasks/$TASK names=(recipe/tasks/*/small.sh)
    names=("${names[@]%/small.sh}")
    names=("${names[@]##*/}")
    if [ ! -f "$folder/small.sh" ]; then
        while IFS=$'\t' read -r name folder; do
            [ "$name" != "$TASK" ] || break
            names+=("$name")
        done < <(list_beside)
    fi
    if [ -z "$folder" ]; then
        printf -v names '%s, ' "${names[@]}"
        echo "error: TASK=$TASK: choose ${names%, }" >&2
        exit 2
    fi
    source "$folder/small.sh"
}
