"""ARPO's trees on a real OpenEnv server with few sessions, which is killed in mid-run: the run goes on with one that is
started again, and ends with its address as the cause where none is. One launch of about a minute.
"""

import random
import re
import time

import pandas as pd
import pytest
from transformers import AutoTokenizer

from recipe.common.reporting.run_metrics import load_metrics
from recipe.common.tiny_model import END_OF_TURN, write_tiny_model
from recipe.tasks.countdown.data import CountdownConfig, write_countdown
from tests.e2e.learning import learn_by_heart
from tests.e2e.runs import NO_VALIDATION, logged_steps, process_tree, start_run, wait_until
from tests.workers.rollout.gym.openenv_servers import openenv_server

ROLLOUT = "actor_rollout_ref.rollout"
SETTINGS = ["tree=arpo", "environment=gym", "environment.max_steps=3", "environment.timeout=20"]
SETTINGS += ["trainer.total_training_steps=1000", "trainer.save_freq=-1", *NO_VALIDATION]
SETTINGS += ["data.max_prompt_length=80", "data.max_response_length=120"]
SETTINGS += [f"{ROLLOUT}.initial_rollouts=2", f"{ROLLOUT}.branch_probability=1.0", f"{ROLLOUT}.entropy_tokens=1"]
pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A folder with data and a model that has learnt to answer each observation with one of four words."""
    folder, draw, encoded = tmp_path_factory.mktemp("inputs"), random.Random(0), []
    write_countdown(folder, CountdownConfig(train_size=64, test_size=4, demo_size=0))
    write_tiny_model(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    for row in pd.read_parquet(folder / "train.parquet").to_dict("records")[:12]:
        (message,) = row["prompt"]
        first = {**message, "content": f"{message['content']}\n\ngoal 3, seed {draw.randrange(2**31)}"}
        ids = tokenizer.apply_chat_template([first], add_generation_prompt=True, return_dict=False)
        mask, said = [0] * len(ids), []
        for _ in range(3):
            said.append(draw.choice(["a", "b", "cd", "ef"]))
            heard = f"{' '.join(said)}: {len(''.join(said))}"
            turn = tokenizer.encode(f"{said[-1]}{END_OF_TURN}")
            answer = tokenizer.encode(f"\n<|im_start|>user\n{heard}{END_OF_TURN}\n<|im_start|>assistant\n")
            ids, mask = ids + turn + answer, mask + [1] * len(turn) + [0] * len(answer)
        encoded.append((ids, mask))
    learn_by_heart(folder / "model", encoded, steps=80)
    return folder


def test_a_run_outlives_its_server_and_ends_with_its_address_if_none_is_started_again(inputs):
    run = inputs / "run"
    with openenv_server(max_sessions=6) as server:
        launcher = start_run(
            inputs, "run", f"environment.url={server.url}", *SETTINGS, script="recipe/common/run_explore.sh"
        )
        wait_until(lambda: logged_steps(run), launcher)
        server.pause()
        time.sleep(3)  # the next prompts' calls are under way
        server.kill()
        last = logged_steps(run)[-1]
        server.start()
        wait_until(lambda: last + 2 in logged_steps(run), launcher, 60)
        processes = process_tree(launcher)
        server.kill()
        _, errors = launcher.communicate(timeout=120)
    table = load_metrics(run).loc[1:]
    assert (table["tree/prompts"] == 4).all() and (table["tree/forks"] == 2).all()  # nothing was lost
    assert (table["environment/replays"] > 0).all() and (table["environment/replay_differs"] == 0).all()
    assert launcher.returncode != 0 and not [process for process in processes if process.is_running()]
    assert re.search(f"error: .*all 4 prompt groups failed.*no OpenEnv server answers at {server.url}", errors), errors
