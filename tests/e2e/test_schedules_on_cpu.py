"""LATR without waiting: new weights interrupt its trees, the run is killed, and goes on with servers of their own.

The first launch has `schedule=colocate_async`; its trainer is killed. The second one resumes with
`schedule=separate_async` and two updates a step: prompts that were under way, finished or not, are trained once. Two
launches of about two minutes.
"""

import json
import pickle
from collections import Counter
from pathlib import Path

import pandas as pd
import pytest

from recipe.common.reporting.run_metrics import load_metrics
from tests.e2e.runs import (
    LATR,
    NO_VALIDATION,
    PARITY_REWARD,
    finished,
    kill,
    logged_steps,
    start_run,
    trees_of,
    wait_until,
)
from verl.trainer.checkpoint_marker import complete_steps

STEPS, BATCH, AHEAD, BOUND = 10, 4, 3, 6
KT, V1 = "actor_rollout_ref.rollout.kt", "trainer.v1"
SETTINGS = [f"trainer.total_training_steps={STEPS}", "trainer.save_freq=2", *NO_VALIDATION]
SETTINGS += ["trainer.tree_freq=1", "data.shuffle=false", PARITY_REWARD]
SETTINGS += [f"{V1}.sampler.max_off_policy_threshold={BOUND}", "data.max_response_length=48"]
# an untrained model is nearly uniform: let every second candidate open a branch
SETTINGS += [f"{KT}.prob_filter_abs_thres=0.0", f"{KT}.prob_filter_rel_thres=1.0", f"{KT}.chunk_size=4"]
SETTINGS += [f"{KT}.rollout_filter_steps=[8,16]"]
# some trees outlast the others of their batch, so that weights change while they grow
SETTINGS += ["actor_rollout_ref.rollout.agent.agent_loop_manager_class=slow_prompts.SlowManager"]
pytestmark = pytest.mark.e2e


def launch(inputs: Path, schedule: str):
    ahead = f"{V1}.{schedule}.num_warmup_batches={AHEAD}"
    kept = f"trainer.rollout_data_dir={inputs}/without_waiting/responses"
    updates = f"actor_rollout_ref.actor.ppo_mini_batch_size={BATCH // 2 if schedule == 'separate_async' else BATCH}"
    settings = [f"schedule={schedule}", ahead, kept, updates, *SETTINGS]
    return start_run(inputs, "without_waiting", *settings, script=LATR)


@pytest.fixture(scope="module")
def resumed_from(inputs) -> int:
    """The step after which the second launch went on to the end."""
    run = inputs / "without_waiting"
    launcher = launch(inputs, "colocate_async")
    wait_until(lambda: 5 in logged_steps(run), launcher)
    kill(launcher, "ray::TaskRunner")
    last = complete_steps(run)[-1]
    assert last < STEPS, "it was killed too late"
    finished(launch(inputs, "separate_async"))
    return last


@pytest.fixture(scope="module")
def table(inputs, resumed_from):
    return load_metrics(inputs / "without_waiting").loc[1:]


def test_all_steps_were_taken_with_both_schedules(inputs, table, resumed_from):
    assert table.index.tolist() == list(range(1, STEPS + 1)) and resumed_from in (4, 6, 8)
    assert logged_steps(inputs / "without_waiting")[0] == resumed_from + 1
    assert (table["tree/prompts"] == BATCH).all() and (table["actor/grad_norm"] > 0).any()


def test_trees_that_new_weights_interrupt_go_on(table):
    assert table["tree/weight_versions"].max() > 1 and (table["tree/branches"] > 1).all()
    assert table["training/off_policy/trajectory_spans/max"].max() > 1


def test_no_response_is_older_than_the_bound(table):
    worst, newest = (
        table[f"training/off_policy/trajectory_{name}"] for name in ("staleness_worst/max", "staleness/min")
    )
    assert worst.between(1, BOUND - 1).any() and worst.max() < BOUND and newest.min() >= 0


def test_servers_sample_what_the_trainer_trains(table):
    """Servers and trainer agree on probabilities where a batch is of the current weights, which may come by socket."""
    fresh = table[table["training/off_policy/trajectory_staleness_worst/max"] == 0]
    assert (fresh["training/rollout_probs_diff_max"] < 1e-4).all()


def test_no_prompt_is_lost_or_trained_twice(inputs, table):
    """The fetched prompts are the first rows of the data. Each is in a trained batch, under way in the last checkpoint,
    or evicted as too old."""
    run = inputs / "without_waiting"
    n_prompts = json.loads((run / f"global_step_{STEPS}/prompts.json").read_text())["n_prompts"]
    rows = pd.read_parquet(inputs / "train.parquet")["prompt"][:n_prompts]
    fetched, trained, uids = Counter(f"user\n{row[0]['content']}\nassistant\n" for row in rows), Counter(), set()
    for step in range(1, STEPS + 1):
        # bytes: a text may have U+2028, where str ends a line
        lines = (run / f"responses/{step}.jsonl").read_bytes().splitlines()
        prompts = {json.loads(line)["uid"].split("_")[0]: json.loads(line)["input"] for line in lines}
        trained += Counter(text for uid, text in prompts.items() if not uid.startswith("pad"))
        uids |= set(prompts)
    assert trained.total() == STEPS * BATCH and not trained - fetched
    left = prompts_under_way(run / f"global_step_{STEPS}")
    assert len(left) == AHEAD * BATCH and not left & uids
    too_old = table.get("training/off_policy/evicted_samples", pd.Series()).sum()
    assert n_prompts == STEPS * BATCH + len(left) + too_old


def prompts_under_way(checkpoint: Path) -> set[str]:
    """Ids of the training prompts that a checkpoint's queue holds."""
    state = pickle.loads((checkpoint / "transfer_queue/controller_state.pkl").read_bytes())
    training = state["partitions"]["train"]
    return {training.revert_keys_mapping[row] for row, tag in training.custom_meta.items() if tag.get("is_prompt")}


@pytest.mark.parametrize("step", [3, STEPS])
def test_trees_are_kept_in_the_step_that_trains_them(inputs, resumed_from, step):
    records = trees_of(inputs / "without_waiting", step)
    assert len(records) == BATCH
    assert all(record["step"] == step and len(record["leaves"]) == len(record["rewards"]) for record in records)
