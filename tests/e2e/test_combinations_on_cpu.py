"""Combinations that no paper has, on the real stack.

LATR's trees with HAPO's sampler and loss and credit by gain, on two nodes, with all of HAPO's mechanisms on;
ARPO's forks without tools with AEPO's loss and credit by path; HATO's search with tools, guided by the reference
answer's likelihood, with AEPO's loss and IGPO's credit. Three launches of a minute or two.
"""

import json
import subprocess
import sys

import pytest

from recipe.common.reporting.run_metrics import load_metrics
from tests.e2e.runs import PARITY_REWARD, ROOT, TWO_STEPS, assert_on_two_nodes, finish_run, imports_made, trees_of
from tests.e2e.searching import write_task_and_model

KT = "actor_rollout_ref.rollout.kt"
PARTS = ["tree=latr", "sampler=tempered", "credit=tree_gain", "loss=hapo"]
SETTINGS = [*TWO_STEPS, PARITY_REWARD, "actor_rollout_ref.rollout.temperature_tau=0.3"]
# an untrained model is nearly uniform: let every second candidate open a branch; one response of four is sampled
SETTINGS += [f"{KT}.prob_filter_abs_thres=0.0", f"{KT}.prob_filter_rel_thres=1.0", f"{KT}.chunk_size=12"]
SETTINGS += [f"+{KT}.mix_ratio_schedule={{0: 0.75}}", f"{KT}.rollout_filter_steps=[3,5]"]
pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def explore(inputs, two_nodes):
    """The run's folder."""
    settings = [*PARTS, *SETTINGS, "trainer.nnodes=2"]
    run = finish_run(inputs, "explore", *settings, script="recipe/common/run_explore.sh", **two_nodes)
    assert_on_two_nodes(run)
    assert (run / "global_step_2/kt.json").exists()
    return run


@pytest.fixture(scope="module")
def table(explore):
    return load_metrics(explore)


def test_trees_share_tokens_and_the_credit_knows(table):
    assert (table["tree/branches"] > 1).all()
    assert (table["credit/shared_tokens"].dropna() > 0).all() and (table["credit/hard_minus_soft"].dropna() > 0).any()


def test_the_first_step_samples_at_the_plain_temperature_and_later_ones_do_not(table):
    tempered, difference = table["hapo/temperature_mean"], table["training/rollout_probs_diff_max"]
    assert tempered.isna()[1] and 0.7 < tempered[2] < 1.3 and tempered[2] != 1.0
    assert difference[1] < 1e-4 < difference[2]  # the rollout's log-probs are those of the tempered policy


def test_the_statistics_are_saved(explore, table):
    """tests/trainer/ppo/test_trainer_state_on_cpu.py shows that they come back."""
    saved = json.loads((explore / "global_step_2/hapo.json").read_text())
    assert saved == {name: table[f"hapo/entropy_{name}"][2] for name in saved} and len(saved) == 4


@pytest.mark.parametrize("step", [1, 2])
def test_the_loss_is_hapos_and_moves_the_policy(table, step):
    row = table.loc[step]
    assert row["hapo/high_entropy_share"] == pytest.approx(0.2, abs=0.02)
    assert 0.2 <= row["actor/hapo/clip_low"] <= 0.4 and 0.2 <= row["actor/hapo/clip_high"] <= 0.4
    assert 0 <= row["actor/hapo/redistributed"] <= 1 and row["actor/grad_norm"] > 0


@pytest.fixture(scope="module")
def forks(inputs):
    rollout = "actor_rollout_ref.rollout"
    parts = ["tree=arpo", "environment=none", "credit=tree_path", "loss=aepo", "update=tree"]
    settings = [f"{rollout}.initial_rollouts=2", f"{rollout}.branch_probability=1.0", f"{rollout}.entropy_tokens=2"]
    settings += [f"{rollout}.max_turn_tokens=3", f"{rollout}.turn_limit=2", PARITY_REWARD]
    return load_metrics(
        finish_run(inputs, "forks", *parts, *TWO_STEPS, *settings, script="recipe/common/run_explore.sh")
    )


def test_trajectories_fork_without_tools(forks):
    assert (forks["tree/forks"] > 0).all() and (forks["tree/initial_rollouts"] == 2).all()
    assert (forks["tree/entropy_after_turn"] > 0).all() and "tree/tool_calls" not in forks
    assert (forks["credit/shared_tokens"] > 0).all() and (forks["actor/grad_norm"] > 0).all()
    assert forks["perf/unique_token_share"].between(0.2, 0.9).all()
    assert forks["perf/trained_token_share"].between(0.05, 1).all()
    assert forks["aepo/entropy_std"].notna().all() and forks["training/rollout_probs_diff_max"].max() < 1e-4


@pytest.fixture(scope="module")
def search(tmp_path_factory):
    """The run's folder: HATO's search, whose steps may call a search engine, here an MCP server, with the model's own
    calls (environment=chat); a turn reads the prompt and the last turn only."""
    folder = tmp_path_factory.mktemp("search")
    write_task_and_model(folder, "chat")
    env = imports_made() | {"METHOD": "arpo", "MODEL_PATH": f"{folder}/model", "DATA_DIR": str(folder)}
    env["ENVIRONMENT"] = "chat"
    env |= {"RUN_DIR": f"{folder}/run", "EXPERIMENT_NAME": "search"}
    command = ["bash", "recipe/arpo/run_search_task_cpu.sh", "tree=hato", "credit=igpo", "loss=aepo", *TWO_STEPS]
    command += ["data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8", "trainer.tree_prompts=8"]
    command += ["actor_rollout_ref.rollout.n=6", "hato.tree.max_step_tokens=64", "hato.tree.step_delimiter='</think>'"]
    command += ["environment.max_context=150", "environment.max_rows=2"]
    tool = "actor_rollout_ref.rollout.tools.tool_instances.search"
    server = f"command: [{sys.executable}, {ROOT}/tests/e2e/search_mcp_server.py, {folder}/corpus.jsonl]"
    command += [f"{tool}.class_path=verl.workers.rollout.tools.mcp.tool.MCPTool", f"~{tool}.params"]
    command += [f"+{tool}.params={{{server}, tools: [search], start_timeout: 300}}"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "run"


def test_the_search_has_tools(search):
    table = load_metrics(search)
    assert (table["tree/tool_calls"] > 0).all() and (table["tree/leaves"] > 1).all()
    assert (table["tree/tool_search/calls"] > table["tree/tool_search/failures"]).all()
    assert (table["tree/tool_search/own_faults"] == 0).all()
    assert (table["credit/shared_tokens"] > 0).all() and (table["actor/grad_norm"] > 0).all()
    records = trees_of(search, 1)
    segments = [segment for record in records for segment in record["segments"]]
    results = [segment for segment in segments if segment["author"] == "tool"]
    assert results and all("value" not in segment["info"] for segment in results)
    assert (table["tree/rows_per_rollout"] > 1).all() and table["training/rollout_probs_diff_max"].max() < 1e-4
    assert (table["tree/untrained_tokens"] > 0).any() and any("context_tokens" in it["info"] for it in results)
    assert all(1 <= len(record["leaves"]) == len(record["rewards"]) <= 6 for record in records)
    assert (search / "global_step_2/hato.pt").exists()
