"""Writes a checkpoint of a run as a Hugging Face folder with a model card; see scripts/export.sh.

    python scripts/export.py outputs/hapo_seed0 40 outputs/exported

The card, FOLDER/README.md, holds the method, the data, and what the trainer's validation and the
evaluations of this step (outputs/results/RUN/step_N/*.log) measured, with intervals where an evaluation has them.
"""

import argparse
import sys
from pathlib import Path

from omegaconf import OmegaConf

sys.path.insert(0, str(Path(__file__).resolve().parent))
from read_log import read_log, validation_results  # noqa: E402

from recipe.common.reporting.comparison import Results  # noqa: E402
from recipe.common.reporting.model_card import (  # noqa: E402
    CARD_FILE,
    CONFIG_FILE,
    CheckpointFacts,
    model_card,
    shared_config,
)
from recipe.common.reporting.run_metrics import load_metrics  # noqa: E402
from verl.evaluation.model.checkpoint import checkpoint_step, has_lora, lora_settings, write_model_folder  # noqa: E402
from verl.trainer.checkpoint_marker import checkpoints, saved_config  # noqa: E402
from verl.utils.atomic_files import new_folder  # noqa: E402


def measurements(run: Path, step: int) -> Results:
    """Return source (evaluation, or validation by the trainer at this step) -> data set -> metric -> value."""
    results: Results = {}
    for log in sorted((run.parent / "results" / run.name / f"step_{step}").glob("*.log")):
        for cell in read_log(log):
            results.setdefault("evaluation", {}).setdefault(cell.dataset, {})[cell.metric] = cell.value
    try:
        metrics = load_metrics(run)
    except FileNotFoundError:  # The run had another logger than verl's file logger.
        return results
    row = metrics.loc[step].dropna().to_dict() if step in metrics.index else {}
    for (dataset, metric), value in validation_results(row).items():
        results.setdefault("validation by the trainer", {}).setdefault(dataset, {})[metric] = value
    return results


def export(run: Path, step: int | None, folder: Path) -> None:
    """Write a run's checkpoint (None: the last complete one) and its card to `folder`, which appears only when it is
    complete."""
    if folder.exists():
        raise FileExistsError(f"{folder} exists: choose another folder, or remove it")
    step = checkpoint_step(run, step)
    checkpoint = checkpoints(run)[step]
    actor, config = checkpoint / "actor", saved_config(checkpoint)
    with new_folder(folder) as unfinished:
        dtype = write_model_folder(actor, unfinished)
        facts = CheckpointFacts(
            run=run.name,
            step=step,
            config=config,
            dtype=str(dtype).removeprefix("torch."),
            lora=lora_settings(actor) if has_lora(actor) else None,
            results=measurements(run, step),
        )
        (unfinished / CARD_FILE).write_text(model_card(facts), encoding="utf-8")
        if config is not None:
            OmegaConf.save(shared_config(config), unfinished / CONFIG_FILE)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN", type=Path, help="run folder, or its name under outputs/")
    parser.add_argument("step", metavar="STEP", type=int, nargs="?", help="default: the last complete checkpoint")
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="new folder")
    options = parser.parse_args(arguments)
    run = options.run if options.run.is_dir() else Path("outputs") / options.run
    try:
        export(run.resolve(), options.step, options.folder)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    print(options.folder)


if __name__ == "__main__":
    main()
