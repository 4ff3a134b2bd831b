"""Writes a checkpoint of a run as a Hugging Face folder; see scripts/export.sh.

python scripts/export.py outputs/hapo_seed0 40 outputs/exported
"""

import argparse
import sys
from pathlib import Path

from verl.evaluation.model.checkpoint import checkpoint_step, write_model_folder
from verl.trainer.checkpoint_marker import checkpoints


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN", type=Path, help="run folder, or its name under outputs/")
    parser.add_argument("step", metavar="STEP", type=int, nargs="?", help="default: the last complete checkpoint")
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="new folder")
    options = parser.parse_args(arguments)
    if options.folder.exists():
        sys.exit(f"error: {options.folder} exists: choose another folder, or remove it")
    run = (options.run if options.run.is_dir() else Path("outputs") / options.run).resolve()
    try:
        write_model_folder(checkpoints(run)[checkpoint_step(run, options.step)] / "actor", options.folder)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    print(options.folder)


if __name__ == "__main__":
    main()
