"""AEPO on the real stack of two nodes, a search server beside them. How many nodes there are stands in the environment,
as users of run scripts set it.

Tools are called, trajectories branch, a hanging tool costs its own prompt only. One launch of about two minutes. The
model has learnt the form from some demonstrations by heart, before, in seconds.
"""

import json
import subprocess
import sys
from contextlib import contextmanager

import pytest

from recipe.common.reporting.run_metrics import load_metrics
from tests.e2e.runs import ROOT, assert_on_two_nodes, imports_made, listens, trees_of, wait_until
from tests.e2e.searching import write_task_and_model
from verl.evaluation.model.server import free_port

TOOLS = "actor_rollout_ref.rollout.tools"
pytestmark = pytest.mark.e2e


@contextmanager
def search_server(corpus):
    """Start a search server and yield its URL."""
    port = free_port()
    command = [sys.executable, "scripts/search_server.py", "--corpus", str(corpus), "--port", str(port)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: listens(port), process, 60)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def run(tmp_path_factory, two_nodes):
    folder = tmp_path_factory.mktemp("arpo")
    write_task_and_model(folder)
    name = json.loads((folder / "corpus.jsonl").read_text().splitlines()[0])["title"]
    search = f"{TOOLS}.tool_instances.search"
    env = imports_made() | {"METHOD": "aepo", "MODEL_PATH": f"{folder}/model", "DATA_DIR": str(folder)}
    env |= {"RUN_DIR": f"{folder}/run", "EXPERIMENT_NAME": "arpo", "NNODES": "2"} | two_nodes
    command = ["bash", "recipe/arpo/run_search_task_cpu.sh", "algorithm.adv_estimator=arpo_hard"]
    command += ["trainer.total_training_steps=2", "trainer.save_freq=2", "trainer.test_freq=2", "trainer.tree_freq=1"]
    command += ["trainer.tree_prompts=8", "trainer.val_before_train=false", "data.train_batch_size=8"]
    command += ["actor_rollout_ref.actor.ppo_mini_batch_size=8", "actor_rollout_ref.rollout.n=6"]
    command += ["actor_rollout_ref.rollout.val_kwargs.n=2", "actor_rollout_ref.rollout.group_timeout=60"]
    command += [f"{TOOLS}.timeout=1000", f"{search}.class_path=hanging_search.HangingSearch"]
    command += [f"~{search}.params.corpus", f"+{search}.params.hangs_on={name}"]
    command += [f"+{search}.params.asked={folder}/asked"]
    with search_server(folder / "corpus.jsonl") as url:
        command.append(f"+{search}.params.url={url}")
        result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    assert_on_two_nodes(folder / "run")
    return folder / "run"


def test_tools_are_called_and_trajectories_branch(run):
    table = load_metrics(run).loc[1:]
    assert (table["tree/tool_calls"] > 0).all() and (table["tree/forks"] > 0).any()
    # most calls go well; the policy still writes a broken one now and then
    assert (table["tree/tool_python/calls"] > 2 * table["tree/tool_python/failures"]).all()
    made = table["tree/initial_rollouts"] + table["tree/forks"] + table["tree/filled"]
    assert made.tolist() == pytest.approx([6, 6])
    # the model's tokens are scored as they were sampled, whatever stands between them
    assert table["training/rollout_probs_diff_max"].max() < 1e-4
    assert table["credit/shared_tokens"].max() > 0 and table["credit/hard_minus_soft"].notna().all()
    assert (table["aepo/entropy_std"] > 0).all()


def test_a_hanging_tool_costs_its_own_prompt_only(run):
    prompts = load_metrics(run)["tree/prompts"].dropna()
    assert sorted(prompts) == [7, 8]


def test_results_stand_in_the_trees_and_are_not_the_models(run):
    records = trees_of(run, 1) + trees_of(run, 2)
    tools = [segment for record in records for segment in record["segments"] if segment["author"] == "tool"]
    assert {segment["info"]["tool"] for segment in tools} == {"search", "python"}
    assert all(segment["log_probs"] is None for segment in tools)
    for record in records:
        assert len(record["leaves"]) == len(record["rewards"]) == 6


def test_validation_uses_the_same_tools(run):
    table = load_metrics(run)
    assert table["val-aux/search_task/tool_calls/mean@2"].dropna().iloc[-1] > 0
