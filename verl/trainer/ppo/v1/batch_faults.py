"""Finds in a batch what no update can learn from, and the likely reason."""

from collections.abc import Sequence
from types import SimpleNamespace

import ray
import torch

from verl.trainer.ppo.v1.batch_rows import BatchRows
from verl.utils.fault_reports import cause_of
from verl.workers.rollout.rows import reward_batch

# Forms of an answer which prompts ask for and rewards read.
FORMS = ("…", "\\boxed{…}", "Answer: …", "#### …", "<answer>…</answer>")
TRIAL_SECONDS = 60

# Columns of numbers for each token on which an update depends, in the order of their computation, and their source.
COMPUTED_BY = {
    "rm_scores": "the reward",
    "rollout_log_probs": "the engine, whose weights are then not those of the trainer",
    "old_log_probs": "the actor",
    "ref_log_prob": "the reference policy",
    "values": "the critic",
    "advantages": "algorithm.adv_estimator",
    "returns": "algorithm.adv_estimator",
}


def not_finite(rows: BatchRows) -> str | None:
    """Return a text that names the first column with NaN or infinity, and what computed it; None if there is none."""
    rows.fetch(*COMPUTED_BY)
    for name, computed_by in COMPUTED_BY.items():
        cells = rows.column(name, rows.real)
        if cells and not torch.cat(cells).isfinite().all():
            faulty = sum(not cell.isfinite().all() for cell in cells)
            return f"{name} of {faulty} of {len(cells)} responses, computed by {computed_by}"
    return None


def why_rewards_are_equal(rows: BatchRows, trainer) -> str:
    """Return the likely reason why all responses of a batch have the same reward, as a part of a sentence."""
    lengths, limit = [rows.tags[row]["response_len"] for row in rows.real], trainer.config.data.max_response_length
    if max(lengths) <= 1:
        return "all responses are empty: compare the chat template and the end-of-sequence token with the model's"
    if min(lengths) >= limit:
        return f"all responses are cut at data.max_response_length={limit}: raise it, or let the model learn to end"
    row = rows.real[0]
    prompt, response = (trainer.tokenizer.decode(rows.column(name, [row])[0]) for name in ("prompts", "responses"))
    asked_for = [form for form in FORMS if (mark := form.split("…")[0].strip()) and mark in prompt]
    try:
        rewards = _rewards_of_forms(rows, row, trainer)
    except Exception as error:
        read = f"the reward could not be tried with the reference answer ({cause_of(error)})"
    else:
        best = max(rewards.values())
        readable = [form for form, reward in rewards.items() if reward == best > float(rows.rewards[row].sum())]
        read = f"the reward is higher for the reference answer in {_listed(readable)}"
    return (
        f"of the forms {_listed(FORMS)} the prompt asks for {_listed(asked_for)}; {read}; a response: {response!r:.300}"
    )


def _listed(forms: Sequence[str]) -> str:
    return ", ".join(f"'{form}'" for form in forms) or "none"


def _rewards_of_forms(rows: BatchRows, row: int, trainer) -> dict[str, float]:
    """Return the reward of the reference answer of a row's prompt in each of `FORMS`."""
    names = ("uid", "raw_prompt", "data_source", "reward_model", "extra_info")
    prompt = {name: cells[0] for name in names if (cells := rows.column(name, [row])) is not None}
    truth = prompt["reward_model"]["ground_truth"]
    outputs = [
        SimpleNamespace(
            prompt_ids=rows.column("prompts", [row])[0].tolist(),
            response_ids=trainer.tokenizer.encode(form.replace("…", str(truth)), add_special_tokens=False),
            num_turns=2,
            extra_fields={},
        )
        for form in FORMS
    ]
    worker = trainer.reward_loop_manager.reward_loop_worker_handles[0]
    results = ray.get(worker.compute_score_batch.remote(reward_batch(outputs, prompt)), timeout=TRIAL_SECONDS)
    return {form: float(result["reward_score"]) for form, result in zip(FORMS, results, strict=True)}
