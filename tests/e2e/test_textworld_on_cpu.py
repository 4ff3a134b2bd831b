"""Text games on the real stack: ARPO's trees in real games, and an evaluation. About a minute and a half.

The model has learnt a few games' walkthroughs, with detours, by heart.
"""

import os
import subprocess
import sys

import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf
from transformers import AutoTokenizer
from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset

from recipe.common.reporting.run_metrics import load_metrics
from recipe.common.tiny_model import write_tiny_model
from recipe.tasks.textworld.data import MODEL, TextWorldConfig, write_games
from tests.e2e.learning import learn_by_heart
from tests.e2e.runs import AS_TYPED, ROOT, TWO_STEPS, finish_run, trees_of
from tests.packages import TEXTWORLD, installed
from verl.evaluation.scores.results import parse_result_lines

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def path():
    """The PYTHONPATH of runs."""
    sys.path.append(package := str(installed(TEXTWORLD)))
    yield f"{ROOT}/tests/e2e:{ROOT}:{package}"
    sys.path.remove(package)


@pytest.fixture(scope="module")
def run(tmp_path_factory, path):
    folder = tmp_path_factory.mktemp("textworld")
    write_games(folder, TextWorldConfig(train_size=4, test_size=2, demo_size=16, detours=0.6))
    write_tiny_model(folder / "model", MODEL)
    config = OmegaConf.create({"pad_mode": "no_padding", "truncation": "error", "max_length": 2000})
    rows = MultiTurnSFTDataset(str(folder / "sft.parquet"), AutoTokenizer.from_pretrained(folder / "model"), config)
    encoded = [(row["input_ids"].tolist(), row["loss_mask"].tolist()) for row in rows]
    learn_by_heart(folder / "model", encoded, steps=80)
    options = [
        "tree=arpo",
        "actor_rollout_ref.rollout.initial_rollouts=2",
        "actor_rollout_ref.rollout.entropy_tokens=1",
    ]
    options += TWO_STEPS
    return finish_run(
        folder, "run", *options, script="recipe/common/run_explore.sh", TASK="textworld", PYTHONPATH=path, **AS_TYPED
    )


def test_trees_fork_in_real_games_and_the_games_give_the_rewards(run):
    table = load_metrics(run).loc[1:]
    assert (table["tree/forks"] > 0).all() and (table["environment/instances"] > 0).all()
    assert (table["environment/replay_differs"] == 0).all() and (table["environment/failures"] == 0).all()
    assert (table["training/rollout_probs_diff_max"] < 1e-4).all()
    rewards = [reward for record in trees_of(run, 1) + trees_of(run, 2) for reward in record["rewards"]]
    assert 1.0 in rewards and set(rewards) <= {0.0, 1.0}
    observations = [
        segment for record in trees_of(run, 1) for segment in record["segments"] if segment["author"] == "tool"
    ]
    assert observations and all(segment["log_probs"] is None for segment in observations)


def test_the_checkpoint_is_evaluated_in_the_games(run, path):
    env = os.environ | {"PYTHONPATH": path} | AS_TYPED
    command = ["bash", "scripts/eval-textworld.sh", "run", f"model={run}/global_step_2/actor/huggingface"]
    command += ["n=2", f"output_dir={run.parent}/out", f"files=[{run.parent}/train.parquet]"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (result,) = parse_result_lines(done.stdout.splitlines())
    assert result.n_questions == pq.read_metadata(run.parent / "train.parquet").num_rows == 4
    assert result.metrics["Reward-Mean"] == result.metrics["Acc-Mean@2"] and "Lost-Share" not in result.metrics
