"""scripts/explore.sh as a user calls it, on a real vLLM engine; its numbers: tests/evaluation."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from recipe.common.tiny_model import write_tiny_model
from recipe.tasks.countdown.data import CountdownConfig, write_countdown
from tests.forked import as_in_a_run
from verl.utils.parts import parts

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))
from explore import config_of  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("explore")
    write_countdown(folder, CountdownConfig(train_size=8, test_size=8, demo_size=0))
    write_tiny_model(folder / "model")
    return folder


def explore(inputs, *overrides: str, **variables: str) -> subprocess.CompletedProcess:
    command = ["bash", "scripts/explore.sh", f"{inputs}/model", f"{inputs}/test.parquet", f"output_dir={inputs}/out"]
    env = as_in_a_run({**os.environ, **variables})
    options = {"cwd": ROOT, "env": env, "capture_output": True, "text": True, "timeout": 600}
    return subprocess.run([*command, *overrides], **options)


def test_the_whole_script(inputs):
    done = explore(inputs, "prompts=8", "n=4", "temperatures=[1.0]", "seed=1")
    assert done.returncode == 0, done.stderr[-3000:]
    stem = inputs / f"out/model/explore_{inputs.name}_test_seed1"
    files = [f"{stem}.{suffix}" for suffix in ("md", "json")]
    lines = done.stdout.splitlines()
    assert lines[-1] == f"written: {', '.join(files)}" and all(map(os.path.getsize, files))
    assert lines[-2].startswith("actor_rollout_ref.rollout.kt.prob_filter_abs_thres=")
    rows = {row["policy"]: row for row in json.loads(Path(files[1]).read_text())["rows"]}
    trees = [name for name, tree in parts("tree").items() if not (tree.alias or tree.forks_at_results)]
    trees.remove("plain")
    assert list(rows) == ["plain T=1.0", *trees]
    assert all(f"| {name} | " in done.stdout and row["seconds"] > 0 for name, row in rows.items())
    assert all(name in done.stderr for name in rows)  # in the progress bar
    # an untrained model: four responses of up to 12 tokens, of which hardly any two begin alike
    assert 12 < rows["plain T=1.0"]["tokens"] <= 48 and rows["plain T=1.0"]["accuracy"] < 0.5
    assert rows["over_generation"]["tokens"] == pytest.approx(2 * rows["plain T=1.0"]["tokens"], rel=0.5)


def test_a_dry_run_starts_nothing(inputs):
    done = explore(inputs, "prompts=4", "seed=2", DRY_RUN="1")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "data: 4 prompts" in done.stdout and done.stdout.endswith("nothing was started\n")
    assert not (inputs / f"out/model/explore_{inputs.name}_test_seed2.md").exists()


def test_the_lengths_of_small_tasks_are_those_of_their_runs(inputs):
    scripts = {name: f"tasks/{name}/small.sh" for name in ("textworld", "walk")}
    scripts |= {"word_problems": "common/run_smollm2.sh"}
    assert scripts.keys() == {name for name, task in parts("task").items() if task.cpu_lengths}
    for task, script in scripts.items():
        own = inputs / f"{task}.parquet"
        pd.read_parquet(inputs / "test.parquet").assign(data_source=task).to_parquet(own)
        for hardware, overrides in (("cpu", []), ("cpu", ["data.max_response_length=7"]), ("gpu", [])):
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("HARDWARE", hardware)
                data = config_of(f"{inputs}/model", str(own), overrides).data
            lengths = [f"data.max_{what}_length={data[f'max_{what}_length']}" for what in ("prompt", "response")]
            text = (ROOT / "recipe" / script).read_text()
            assert [each in text for each in lengths] == [hardware == "cpu", hardware == "cpu" and not overrides]


def test_errors_end_it_in_a_line(inputs):
    done = explore(inputs, "actor_rollout_ref.rollout.kt.depth=3")
    last = done.stderr[done.stderr.index("error: ") :]
    assert done.returncode == 1 and "depth" in last and "Traceback" not in last
    usage = subprocess.run(["bash", "scripts/explore.sh"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert usage.returncode == 2 and "MODEL DATA" in usage.stderr
