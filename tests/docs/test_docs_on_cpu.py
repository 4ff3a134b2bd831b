"""The documentation holds: commands run or compose, and paths and links lead somewhere.

Blocks marked `bash cpu` in README.md, docs/*.md and recipe/compared/*/README.md are run in a copy of the repository
that has a tiny model, data and made runs, with DRY_RUN=1, so that nothing trains (tests/e2e does). Blocks with a
language and a path, such as `python recipe/dice/dice_tool.py`, are files of worked examples: they are written into the
copy first.
"""

import asyncio
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

import verl.trainer
from recipe.common.tiny_model import TinyModelConfig, write_tiny_model
from recipe.tasks.countdown.data import CountdownConfig, write_countdown
from recipe.tasks.search.data import CHAT_WORDS, EXTRA_WORDS, SearchTaskConfig, write_search_task
from recipe.tasks.walk.data import WalkConfig, write_walks
from tests.docs.commands import composed_as_started, configs_of
from tests.forked import with_forks
from verl.evaluation.scores.results import EvalResult, format_result
from verl.trainer.checkpoint_marker import MARKER

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
UPSTREAM = Path(verl.trainer.__path__[0]).parent
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]
COMPARED = sorted((ROOT / "recipe/compared").glob("*/README.md"))
RECIPES = [*sorted((ROOT / "recipe").glob("*/README.md")), *COMPARED]
LINKED = [*PAGES, *RECIPES, ROOT / "verl/utils/math_answers/README.md"]
FENCE = re.compile(r"^```(\S*)[ \t]*([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FOLDERS = "verl|recipe|scripts|benchmarks|studies|tests|docs|vllm_patches|verl_patches"
REPOSITORY_PATH = re.compile(rf"(?:{FOLDERS})/[\w.*/-]*|README\.md|pyproject\.toml|[\w-]+\.lock")

# commands that take minutes, or start no run
NOT_RUN = {
    "bash scripts/setup.sh": "makes the environment",
    "bash scripts/test.sh": "runs this test",
    "bash scripts/quickstart.sh": "trains",
}
RUN_FOLDERS = sorted({path.parent.name for path in (ROOT / "recipe").glob("*/run_*.sh")})
# a run script alone: tests/recipe/test_run_scripts_on_cpu.py makes its dry run
COVERED = re.compile(rf"bash recipe/({'|'.join(RUN_FOLDERS)})/run_\w+\.sh")
NO_CONFIG = ("setup", "test", "quickstart", "serve", "lock", "check_gpu", "run_compare", "export")


class Block(NamedTuple):
    page: Path
    language: str
    rest: str
    text: str

    @property
    def commands(self) -> list[str]:
        """One a line, continued lines joined, without comments."""
        lines = re.sub(r"\\\n\s*", "", self.text).splitlines()
        return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]


def blocks(page: Path) -> list[Block]:
    return [Block(page, *groups) for groups in FENCE.findall(page.read_text())]


ALL_BLOCKS = [block for page in [*PAGES, *COMPARED] for block in blocks(page)]
FILES = {block.rest: block.text for block in ALL_BLOCKS if "/" in block.rest}
CPU_COMMANDS = list(
    dict.fromkeys(
        command
        for block in ALL_BLOCKS
        if (block.language, block.rest) == ("bash", "cpu")
        for command in (line.removeprefix("DRY_RUN=1 ") for line in block.commands)
        if command not in NOT_RUN and not COVERED.fullmatch(command)
    )
)


def configured(command: str) -> bool:
    """Whether a command starts a script that composes a Hydra config."""
    words = [word for word in shlex.split(command, comments=True) if not re.match(r"[A-Z_]+=", word)]
    if words[:2] == ["python", "scripts/evaluate.py"]:
        return True
    script = re.fullmatch(r"(?:recipe/\w+|scripts)/([\w.-]+)\.sh", words[1]) if words[:1] == ["bash"] else None
    return script is not None and script[1] not in NO_CONFIG


# commands with a config that no test runs, not even as a dry run
CONFIGURED = list(
    dict.fromkeys(
        command
        for block in ALL_BLOCKS
        if (block.language, block.rest) == ("bash", "")
        for command in block.commands
        if configured(command) and command not in CPU_COMMANDS and not COVERED.fullmatch(command)
    )
)


# ---- the copy ----

# Countdown's last step, which the pages name.
STEP = 500


def copy_repository(folder: Path) -> Path:
    """Copy what commands need of the repository, and write the files of the worked examples."""
    for name in ("recipe", "verl", "verl_patches", "vllm_patches", "scripts"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "docs").mkdir()
    for name in ("README.md", "pyproject.toml", "requirements-cpu.lock", "docs/metrics.md"):
        shutil.copy(ROOT / name, folder / name)
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def make_run(folder: Path, model: Path, accuracy: float) -> None:
    """A run that has validated twice, with a complete checkpoint."""
    actor = folder / f"global_step_{STEP}/actor"
    shutil.copytree(model, actor / "huggingface")
    (actor.parent / MARKER).write_text(f"{STEP}\n")
    (folder / "latest_checkpointed_iteration.txt").write_text(str(STEP))
    steps = [
        {"critic/score/mean": 0.1, "actor/entropy": 1.0, "val-core/countdown/acc/mean@8": step * accuracy / STEP}
        for step in (1, STEP)
    ]
    lines = (json.dumps({"step": step, "data": data}) for step, data in zip((1, STEP), steps, strict=True))
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))


def make_trees(folder: Path) -> None:
    segments = [
        {"parent": None, "token_ids": [3, 4], "log_probs": [-0.5, -1.0], "author": "model", "info": {}},
        {"parent": 0, "token_ids": [5], "log_probs": [-0.1], "author": "model", "info": {}},
        {"parent": 0, "token_ids": [6], "log_probs": [-2.0], "author": "model", "info": {}},
    ]
    tree = {"step": 10, "uid": "a", "prompt": "3 4 = 7", "rewards": [1.0, 0.0], "segments": segments, "leaves": [1, 2]}
    folder.mkdir(parents=True)
    (folder / "step_000010.jsonl").write_text(json.dumps(tree) + "\n")


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    """The copy, with what the commands of the pages find in a repository that has been used."""
    folder = copy_repository(tmp_path_factory.mktemp("docs"))
    outputs = folder / "outputs"
    outputs.mkdir()
    model = write_tiny_model(outputs / "tiny_model")
    for name in ("warm_start", "warm_start_walk", "warm_start_sorting", "search_task_sft"):
        shutil.copytree(model, outputs / name / "huggingface")
    chat_words = TinyModelConfig(extra_words=EXTRA_WORDS + CHAT_WORDS)
    write_tiny_model(outputs / "search_task_chat_sft/huggingface", chat_words)
    write_countdown(outputs / "data/countdown", CountdownConfig(train_size=64, test_size=8, demo_size=0))
    write_walks(outputs / "data/walk", WalkConfig(train_size=64, valid_size=8, test_size=8, demo_size=0))
    sizes = SearchTaskConfig(train_size=32, test_size=8, demo_size=2)
    asyncio.run(write_search_task(outputs / "data/search_task", sizes))
    make_run(outputs / "grpo_countdown_seed0", model, 0.38)
    make_run(outputs / "dapo_countdown_seed0", model, 0.41)
    make_run(outputs / "grpo_walk_seed0", model, 0.2)
    make_trees(outputs / "latr_grpo_countdown_seed0/trees")
    result = EvalResult(
        experiment="grpo_countdown_seed0",
        step=STEP,
        dataset="countdown",
        n_samples=8,
        n_questions=8,
        metrics={"Acc-Pass@1": 0.38},
    )
    log = outputs / f"results/grpo_countdown_seed0/step_{STEP}/countdown.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("\n".join(format_result(result)))
    return folder


def environment(folder: Path, **more: str) -> dict[str, str]:
    """Return the variables of a user in `folder` who has activated the environment that runs the tests."""
    kept = {name: value for name, value in os.environ.items() if name not in ("VERL_PLATFORM", "HF_HUB_OFFLINE")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}"
    return {**kept, "PATH": path, "VIRTUAL_ENV": sys.prefix, "PYTHONPATH": str(folder), "DRY_RUN": "1", **more}


# ---- commands that run ----


@pytest.fixture(scope="module")
def runs(work) -> dict[str, subprocess.CompletedProcess]:
    """Command -> how it ended: makers of data and models in turn, then the others two at a time."""

    def run(command: str) -> subprocess.CompletedProcess:
        env = with_forks(environment(work), root=work)
        options = {"cwd": work, "env": env, "capture_output": True, "text": True, "timeout": 300}
        return subprocess.run(["bash", "-euo", "pipefail", "-c", command], **options)

    first = [command for command in CPU_COMMANDS if command.startswith("python -m recipe.")]
    others = [command for command in CPU_COMMANDS if command not in first]
    results = {command: run(command) for command in first}
    with ThreadPoolExecutor(2) as pool:
        return results | dict(zip(others, pool.map(run, others), strict=True))


@pytest.mark.parametrize("command", CPU_COMMANDS)
def test_a_command_for_cpu_runs(runs, command):
    done = runs[command]
    assert done.returncode == 0, f"{done.stdout[-1500:]}\n{done.stderr[-1500:]}"
    if configured(command):
        assert "nothing was started" in done.stdout, done.stdout


def test_shown_files_of_the_repository_are_as_they_are():
    shown = [name for name in FILES if (ROOT / name).exists()]
    assert {"recipe/common/tree.py", "recipe/compared/tree_grpo/credit.py"} <= set(shown)
    assert [name for name in shown if (ROOT / name).read_text() != FILES[name]] == []


@pytest.mark.parametrize("command", CONFIGURED)
def test_overrides_compose_with_the_scripts_config(tmp_path, command):
    configs = configs_of(command, tmp_path)
    assert configs, "the script started no trainer and no evaluation"
    for config in configs:
        composed_as_started(*config)


# ---- paths and links ----


def without_fences(page: Path) -> str:
    return FENCE.sub("", page.read_text())


def named_paths(page: Path) -> Iterator[str]:
    for span in re.findall(r"`([^`\n]+)`", without_fences(page)):
        words = (word.strip(",.;:()'\"") for word in span.split())
        yield from (word for word in words if REPOSITORY_PATH.fullmatch(word))


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_exist(page):
    missing = [
        name
        for name in named_paths(page)
        if name not in FILES and not (UPSTREAM.parent / name).exists() and not any(ROOT.glob(name.rstrip("/")))
    ]
    assert missing == []


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page):
    targets = re.findall(r"\]\(([^)\s]+)\)", without_fences(page))
    local = [target.split("#")[0] for target in targets if "://" not in target and not target.startswith("#")]
    assert [target for target in local if not (page.parent / target).exists()] == []


def test_every_page_is_in_the_index():
    index = ROOT / "docs/README.md"
    links = (os.path.relpath(page, index.parent) for page in [*(ROOT / "docs").glob("*.md"), *RECIPES] if page != index)
    assert [link for link in links if f"]({link})" not in index.read_text()] == []
