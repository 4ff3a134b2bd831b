"""LoRA on the real stack: vLLM gets an adapter, then merged weights; the run resumes, and its checkpoint merges.

The first launch is synchronous and trains rows; the second one resumes with servers of their own, which get merged
weights, and trains prefix trees. Two launches of about a minute.
"""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from recipe.common.reporting.run_metrics import load_metrics
from tests.e2e.runs import NO_VALIDATION, PARITY_REWARD, finish_run
from verl.evaluation.model.checkpoint import write_model_folder

FIRST, STEPS, RANK = 3, 6, 8
SETTINGS = ["trainer.save_freq=3", *NO_VALIDATION, PARITY_REWARD]
# At this rate the factors leave 0 within a step.
SETTINGS += ["actor_rollout_ref.actor.optim.lr=5e-3", "actor_rollout_ref.actor.optim.lr_warmup_steps=0"]
SETTINGS += ["actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.rollout.calculate_log_probs=true"]
pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def run(inputs) -> Path:
    for steps, *settings in (
        (FIRST, "schedule=sync", "update=rows"),
        (STEPS, "schedule=separate_async", "update=tree"),
    ):
        settings += [*SETTINGS, f"trainer.total_training_steps={steps}"]
        folder = finish_run(inputs, "lora", *settings, script="recipe/common/run_explore.sh", LORA_RANK=str(RANK))
    return folder


def test_both_launches_trained_their_steps(run):
    metrics = load_metrics(run).loc[1:]
    assert metrics.index.tolist() == list(range(1, STEPS + 1))
    assert (metrics["actor/grad_norm"] > 0).all()


def test_the_reference_is_the_model_without_its_adapter(run):
    kl = load_metrics(run)["actor/kl_loss"]
    assert kl[1] == pytest.approx(0, abs=1e-7)
    assert (kl.loc[2:] > 1e-5).all(), kl


def test_vllm_has_the_trained_policy(run):
    """The adapter is sent in float32. Merged weights are rounded to bfloat16, and are an update old."""
    difference = load_metrics(run)["training/rollout_probs_diff_max"]
    assert (difference.loc[:FIRST] < 1e-6).all(), difference
    assert (difference.loc[FIRST + 1 :] < 0.05).all(), difference


def test_the_checkpoint_becomes_a_merged_model(inputs, run, tmp_path):
    actor = run / f"global_step_{STEPS}/actor"
    write_model_folder(actor, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(inputs / "model", dtype=torch.float32)
    tokens = torch.arange(1, 12)[None]
    before = base(tokens).logits.detach()
    adapted = get_peft_model(
        base, LoraConfig(task_type="CAUSAL_LM", r=RANK, lora_alpha=16, target_modules="all-linear")
    )
    saved = torch.load(actor / "model_world_size_1_rank_0.pt", weights_only=False)
    adapted.load_state_dict({name: shard.to_local() for name, shard in saved.items()})  # one rank holds everything
    torch.testing.assert_close(merged(tokens).logits, adapted(tokens).logits, rtol=1e-4, atol=1e-4)
    assert (merged(tokens).logits - before).abs().max() > 1e-3
