# The scripts source this file after scripts/environment.sh. A small task is one that a model of a million parameters learns
# on a laptop, and a pretrained model on GPUs. Its folder, recipe/tasks/NAME or the package of an entry point NAME, has a
# file small.sh, which sets
#   VAL_SPLIT                 name of the file, train or another split, that a run validates on
#   WARM_START  TINY_MODEL    names of folders under outputs/
#   TASK_OPTIONS  WARM_START_OPTIONS    Hydra overrides for the HARDWARE; arrays that are empty at first
# and defines make_data HARDWARE DIR, which makes train.parquet, sft.parquet and the split, and make_tiny_model DIR.

# use_task NAME: sets TASK, and what the task's small.sh sets
use_task() {
    TASK=$1 TASK_OPTIONS=() WARM_START_OPTIONS=()
    local folder=recipe/tasks/$TASK
    if [ ! -f "$folder/small.sh" ]; then # it is another package's, which is not imported
        folder=$(python - "$TASK" <<'END'
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

folders = {file.parent.name: file.parent for file in sorted(Path("recipe/tasks").glob("*/small.sh"))}
for entry in entry_points(group="verl_exploration.parts"):
    module = find_spec(entry.value)
    for folder in module and module.submodule_search_locations or ():
        if Path(folder, "small.sh").is_file():
            folders[entry.name] = folder
if sys.argv[1] not in folders:
    print(f"error: TASK={sys.argv[1]}: choose {', '.join(folders)}", file=sys.stderr)
    sys.exit(2)
print(folders[sys.argv[1]])
END
        ) || exit 2
    fi
    source "$folder/small.sh"
}
