"""LATR on the real stack: trees on vLLM, from the second step on half of the responses sampled plainly.

As in the paper's scripts the loss has a KL term, and so the run a reference policy. The model's embeddings are not
tied, which FSDP2 wraps another way. Both policies are computed on the prefix tree. The run's processes are no forks
here, as on GPUs and on a cluster of users. One launch of about two minutes.
"""

import json
import os

import numpy as np
import pytest
from safetensors.torch import load_file

from recipe.common.reporting.run_metrics import load_metrics
from recipe.common.tiny_model import TinyModelConfig, write_tiny_model
from tests.e2e.runs import LATR, NO_TOKEN, PARITY_REWARD, finish_run, ray_cluster, trees_of

KT = "actor_rollout_ref.rollout.kt"
SETTINGS = ["trainer.total_training_steps=2", "trainer.save_freq=2", "trainer.test_freq=2"]
SETTINGS += ["trainer.val_before_train=false", "trainer.tree_freq=1", "trainer.tree_prompts=3"]
# an untrained model is nearly uniform: let every second candidate open a branch
SETTINGS += [f"{KT}.prob_filter_abs_thres=0.0", f"{KT}.prob_filter_rel_thres=1.0", f"+{KT}.mix_ratio_schedule.2=0.5"]
SETTINGS += [f"{KT}.enable_param_scheduler=true"]
# an untrained model earns it sometimes, so that the policy has moved by the second step
SETTINGS += [PARITY_REWARD, "actor_rollout_ref.actor.optim.lr_warmup_steps=0"]
SETTINGS += ["update=tree", "actor_rollout_ref.actor.use_kl_loss=true"]
pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def run(inputs):
    model = write_tiny_model(inputs / "untied", TinyModelConfig(tie_word_embeddings=False))
    with ray_cluster(nodes=1, cpus=12, environment=dict(os.environ)) as address:
        cluster = {"RAY_ADDRESS": address, **NO_TOKEN}
        return finish_run(inputs, "latr", *SETTINGS, script=LATR, MODEL_PATH=str(model), **cluster)


def test_the_schedule_and_the_metrics(run):
    table = load_metrics(run)
    assert list(table["tree/tree_share"].dropna()) == [1.0, 0.5]
    assert table["tree/branches"][1] > 2 and table["tree/suppress_ratio"][1] > 0.1
    # step 1: many suppressed, the thresholds are tightened; step 2: branches stay empty, they are loosened
    assert list(table["tree/tightened_steps"].dropna()) == [1, 0]
    assert table["tree/empty_branch_ratio"][2] > 0.05
    assert json.loads((run / "global_step_2/kt.json").read_text()) == {"tightened_steps": 0}
    assert 0 < table["diversity/edit_distance"][1] <= 1
    # the tree's log-probs are those of the distribution that is trained on
    assert table["training/rollout_probs_diff_max"].max() < 1e-4


def test_the_kl_loss_is_measured_from_the_start_policy(run):
    """The first update begins at the reference policy: no divergence but rounding. The second does not."""
    table = load_metrics(run)
    assert 0 < table["critic/score/mean"][1] < 1 and table["actor/grad_norm"][1] > 0
    assert 0 <= table["actor/kl_loss"][1] < 1e-6 < table["actor/kl_loss"][2] < 10


def test_shared_tokens_are_computed_once(run):
    assert load_metrics(run)["perf/unique_token_share"].between(0.2, 0.8).all()


def test_the_untied_head_was_trained_and_saved(run):
    weights = load_file(run / "global_step_2/actor/huggingface/model.safetensors")
    start = load_file(run.parent / "untied/model.safetensors")
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        assert not weights[name].equal(start[name]), name
    assert not weights["lm_head.weight"].equal(weights["model.embed_tokens.weight"])


@pytest.mark.parametrize("step", [1, 2])
def test_the_trees_are_kept(run, step):
    records = trees_of(run, step)
    assert len(records) == 3
    for record in records:
        assert record["update"] == "tree"
        assert len(record["leaves"]) == len(record["rewards"]) == 4
        for segment in record["segments"]:
            assert len(segment["log_probs"]) == len(segment["token_ids"])
            assert np.isfinite(segment["log_probs"]).all() and max(segment["log_probs"], default=0) <= 0
    assert sum(len(record["segments"]) for record in records) > 3
