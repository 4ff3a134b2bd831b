"""A training step from the rollout's fields to the worker's: upstream's own step on a TransferQueue in memory."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tensordict import NonTensorData
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from recipe.arpo.loss import STANDARDIZED_ENTROPY
from tests.tables import table
from tests.trainer.ppo.toy_step import ACTOR, ROLLOUT, MemoryQueue, config_of, credited, prompts_of, trainer_of
from verl.trainer.ppo.v1 import trainer_base
from verl.trainer.ppo.v1.batch_rows import ORDER, PROBLEM, BatchRows
from verl.trainer.ppo.v1.component import components_of
from verl.trainer.ppo.v1.tree_reports import broken_tools
from verl.utils.parts import computed_fields
from verl.workers.config.prefix_tree import SKIP_ZERO_ADVANTAGES
from verl.workers.rollout.prompt_task import PROMPT_SETTINGS
from verl.workers.rollout.trajectory_tree import TOOL_FAULTS, TREE_METRICS
from verl.workers.utils import field_losses

HAPO = {f"{ACTOR}.policy_loss.loss_mode": "hapo"}
TEMPERED = {f"{ROLLOUT}.adaptive_temperature": True, f"{ROLLOUT}.temperature_tau": 0.05}
AEPO = {f"{ACTOR}.policy_loss.loss_mode": "aepo", f"{ACTOR}.enable_entropy_balanced_advantage": True}

# two prompts; key -> reward, mask, entropies, segments. The last row is one that upstream adds to fill the batch up: a
# copy of the first one's fields.
ROWS = {
    "q_1_0": (0.0, [1, 1, 0, 1], [1.0, 2.0, 9.0, 1.0], [0, 0, 5, 2]),
    "p_0_0": (1.0, [1, 1, 1], [1.0, 1.0, 4.0], [0, 1, 1]),
    "q_0_0": (1.0, [1, 1, 0, 1, 1], [1.0, 2.0, 9.0, 3.0, 3.0], [0, 0, 5, 1, 1]),
    "p_1_0": (0.0, [1], [2.0], [2]),
    "pad_0_0": (0.0, [0], [7.0], [0, 0, 5, 2]),
}


@pytest.fixture
def queue(monkeypatch):
    queue = MemoryQueue(monkeypatch)
    for key, (reward, mask, entropy, segments) in ROWS.items():
        tag = {"is_padding": True} if key.startswith("pad") else {}
        queue.add(key, reward, mask, "qp".find(key[0]), tag, entropy=entropy, segment_ids=segments)
    return queue


def trainer(adv_estimator: str = "grpo", **values):
    return trainer_of({"algorithm.adv_estimator": adv_estimator, "algorithm.norm_adv_by_std_in_grpo": False} | values)


SOFT = {
    "q_1_0": [-0.5, -0.5, 0.0, -0.5],
    "p_0_0": [0.5, 0.5, 0.5],
    "q_0_0": [0.5, 0.5, 0.0, 0.5, 0.5],
    "p_1_0": [-0.5],
    "pad_0_0": [0.0],
}
# the first two tokens of q's trajectories are one segment, p's share none
HARD = SOFT | {"q_1_0": [0.0, 0.0, 0.0, -0.5], "q_0_0": [0.0, 0.0, 0.0, 0.5, 0.5]}


# twice the distance from the root's value 0, since the shared segment's is 0 too
GAIN = SOFT | {"q_1_0": [0.0, 0.0, 0.0, -1.0], "p_0_0": [1.0] * 3, "q_0_0": [0.0, 0.0, 0.0, 1.0, 1.0], "p_1_0": [-1.0]}


@pytest.mark.parametrize(("adv_estimator", "expected"), [("grpo", SOFT), ("arpo_hard", HARD), ("tree_gain", GAIN)])
def test_advantages_and_metrics_of_shared_tokens(queue, adv_estimator, expected):
    metrics = credited(trainer(adv_estimator), queue.batch())
    assert queue.column("advantages") == expected
    # 4 of the model's 11 tokens are shared, and hard differs from soft by 0.5 there
    assert metrics["credit/shared_tokens"] == pytest.approx(4 / 11)
    assert metrics["credit/hard_minus_soft"] == pytest.approx(0.5 * 4 / 11)


def test_tokens_that_upstream_rejects_in_this_step_are_not_counted(queue, monkeypatch):
    """Upstream's `rollout_correction.rollout_rs` sets their response mask to 0 before the credit."""
    upstreams = PPOTrainerSync._compute_advantage

    def credit_and_reject(self, batch, metrics):
        batch = upstreams(self, batch, metrics)
        data = trainer_base.tq.kv_batch_get(batch.keys, batch.partition_id, ["response_mask"])
        masks = [mask * (key != "q_0_0") for key, mask in zip(batch.keys, data["response_mask"].unbind(), strict=True)]
        data["response_mask"] = torch.nested.as_nested_tensor(masks, layout=torch.jagged)
        return trainer_base.tq.kv_batch_put(batch.keys, batch.partition_id, fields=data)

    monkeypatch.setattr(PPOTrainerSync, "_compute_advantage", credit_and_reject)
    metrics = credited(trainer("grpo"), queue.batch())
    # 2 of the 7 counted tokens (4 of p's rows, 3 of q's other row) lie in a segment of both of q's rows
    assert metrics["credit/shared_tokens"] == pytest.approx(2 / 7)


def test_a_part_of_a_held_column_is_sent_with_the_whole_batch(queue):
    rows = BatchRows(queue.batch())
    with rows.held("rm_scores"):
        rows.put("rm_scores", torch.full((1, 5), 7.0), [1])
        assert 7.0 not in queue.column("rm_scores")[rows.keys[1]]
    changed = {key for key, scores in queue.column("rm_scores").items() if 7.0 in scores}
    assert changed == {rows.keys[1]} and rows.batch.keys == rows.keys


def test_a_credit_reads_the_reward_functions_accuracy(queue):
    """Not the scores: here all of p's and q's wrong responses have acc 1, and the others 0."""
    for key, (reward, *_) in ROWS.items():
        queue.rows[key]["extra_fields"] = {"reward_extra_info": {"acc": 1 - reward}}
    values = {"algorithm.passk.k": 1}
    trainer("passk", **values)._compute_advantage(queue.batch(), {})
    expected = {key: [pytest.approx(2 * value, abs=1e-4) for value in row] for key, row in SOFT.items()}
    assert {key: [-value for value in row] for key, row in queue.column("advantages").items()} == expected
    # a row that ends with a step that was given up is wrong, whatever the reward function says of others
    queue.rows["q_1_0"] |= {"dropped": torch.tensor([0, 0, 0, 1]), "extra_fields": {}}
    for key in ROWS.keys() - {"q_1_0"}:
        queue.rows[key]["dropped"] = torch.zeros(len(ROWS[key][1]), dtype=torch.long)
    assert BatchRows(queue.batch("q_")).reward_field("acc").tolist() == [0, 0]
    del queue.rows["p_0_0"]["extra_fields"]["reward_extra_info"]
    with pytest.raises(ValueError, match="returned acc=nan for a response to the prompt p: .* 0 or 1 under acc"):
        trainer("passk", **values)._compute_advantage(queue.batch(), {})


def test_a_credit_reads_the_responses(queue):
    """q's turns after the prompt are compared, and those after token 2."""
    trainer("gigpo", **{"algorithm.gigpo.gamma": 1.0})._compute_advantage(queue.batch(), {})
    # p's rows have one turn each; q's first turn is shared, with the mean return 0.5
    expected = {"p_0_0": [1.0] * 3, "p_1_0": [-1.0], "pad_0_0": [0.0]}
    expected |= {"q_0_0": [0.5, 0.5, 0, 1, 1], "q_1_0": [-0.5, -0.5, 0, -1]}
    assert queue.column("advantages") == expected


@pytest.mark.parametrize("adv_estimator", ["grpo", "arpo_hard", "tree_path"])
def test_a_rollout_without_segments_shares_nothing(queue, adv_estimator):
    for row in queue.rows.values():
        del row["segment_ids"]
    metrics = credited(trainer(adv_estimator), queue.batch())
    assert queue.column("advantages") == SOFT and not [name for name in metrics if name.startswith("credit/")]


@pytest.mark.parametrize("adv_estimator", ["grpo", "hapo", "arpo_hard", "rloo"])
def test_a_trajectory_alone_in_its_group_has_advantage_0(queue, adv_estimator):
    del queue.rows["q_1_0"], queue.rows["pad_0_0"]
    queue.add("r_0_0", 1.0, [1, 1], 9, segment_ids=[0, 0])
    queue.add("r_0_1", 1.0, [1], 9, segment_ids=[0])  # two outputs of one session are one trajectory
    trainer(adv_estimator)._compute_advantage(queue.batch(), {})
    advantages = queue.column("advantages")
    assert not any(advantages["q_0_0"]) and queue.column("returns")["q_0_0"] == advantages["q_0_0"]
    assert all(advantages["p_0_0"]) and all(advantages["p_1_0"])
    if adv_estimator == "grpo":  # the only estimator of upstream that knows sessions
        assert not any(advantages["r_0_0"] + advantages["r_0_1"])


def test_a_tool_whose_every_call_failed_by_its_own_fault_ends_the_run(queue):
    def tools(key, faults, **numbers):
        metrics = {f"tool_{name}/{what}": float(n) for name, pair in numbers.items() for what, n in pair.items()}
        queue.rows[key]["extra_fields"] = {TREE_METRICS: metrics, TOOL_FAULTS: faults}

    search, python = {"calls": 3, "own_faults": 2}, {"calls": 3, "own_faults": 2, "malformed": 1}
    tools("p_0_0", {"python": "no sandbox"}, python=python, search=search)
    tools("q_0_0", {}, python={"calls": 1, "own_faults": 0})
    assert broken_tools(BatchRows(queue.batch())) == {}
    tools("q_0_0", {}, python={"calls": 1, "own_faults": 1}, search={"calls": 1, "own_faults": 0, "malformed": 1})
    assert broken_tools(BatchRows(queue.batch())) == {"python": "no sandbox"}
    with pytest.raises(RuntimeError, match="every call of the tool python failed, by its own fault: no sandbox"):
        credited(trainer("grpo"), queue.batch())


def test_a_number_for_each_token(queue):
    rows = BatchRows(queue.batch())
    assert rows.tokens("segment_ids", -1).tolist() == [
        [-1, -1, -1, -1, -1],
        [2, -1, -1, -1, -1],
        [0, 0, 5, 1, 1],
        [0, 1, 1, -1, -1],
        [0, 0, 5, 2, -1],
    ]
    assert rows.tokens("nobody_sends_it", 0.5).tolist() == [[0.5] * 5] * 5
    queue.rows["p_1_0"]["segment_ids"] = torch.tensor([2, 2])
    with pytest.raises(ValueError, match="segment_ids of p_1_0: 2 for 1 response tokens"):
        BatchRows(queue.batch()).tokens("segment_ids", -1)


def test_groups_are_in_the_order_of_the_data_and_rows_in_that_of_the_sessions(queue):
    rows = BatchRows(queue.batch())
    assert [[rows.keys[row] for row in group.rows] for group in rows.groups] == [["q_0_0", "q_1_0"], ["p_0_0", "p_1_0"]]
    assert [group.problem for group in rows.groups] == ["problem of q", "problem of p"]
    for key in ("q_0_0", "q_1_0"):  # submitted a step later, by a run that was resumed and counts anew
        queue.tags[key]["global_steps"] = 2
    assert [group.uid for group in BatchRows(queue.batch()).groups] == ["p", "q"]


def balanced(made, queue):
    """The batch as two data parallel ranks would get it."""
    made.actor_rollout_wg = SimpleNamespace(_dispatch_info={"actor": [0, 1]})
    made.tokenizer = SimpleNamespace(eos_token_id=5)
    return made._balance_batch(queue.batch(), {})


def test_padding_rows_are_short_and_in_every_mini_batch(queue, monkeypatch):
    del queue.rows["pad_0_0"]
    for i in range(7):  # 11 rows for mini-batches of 8
        queue.add(f"r{i}_0_0", 1.0, [1] * (i + 1), 10 + i, segment_ids=[0] * (i + 1), entropy=[0.0] * (i + 1))
    made = trainer(**{f"{ACTOR}.ppo_mini_batch_size": 4, "trainer.critic_warmup": 0})
    batch = balanced(made, queue)
    padding_rows = [tag.get("is_padding", False) for tag in batch.tags]
    assert len(batch) == 16 and sum(padding_rows) == 5
    assert {tag["seq_len"] for tag, padding_row in zip(batch.tags, padding_rows, strict=True) if padding_row} == {2}
    of_mini_batch = [sum(padding_rows[rank * 8 + part * 4 :][:4]) for part in (0, 1) for rank in (0, 1)]
    assert sorted([sum(of_mini_batch[:2]), sum(of_mini_batch[2:])]) == [2, 3]
    assert advantages_with(made, queue, batch) == advantages_with(made, queue, queue.batch("p", "q", "r"))


def test_groups_stay_together_where_shared_tokens_are_computed_once(queue):
    """Four prompts with two rows each, for two ranks with two mini-batches: upstream's balance would part them."""
    queue.rows.clear()
    for prompt, length in enumerate((9, 1, 4, 6)):
        for session in range(2):
            response = [1] * (length + 3 * session)
            ids = [session] * len(response)
            queue.add(f"g{prompt}_{session}_0", 1.0, response, 10 + prompt, segment_ids=ids, entropy=[0.0] * len(ids))
    keys = {"ppo_mini_batch_size": 2, "use_prefix_tree": True}
    made = trainer(**{f"{ACTOR}.{key}": value for key, value in keys.items()}, **{"trainer.critic_warmup": 0})
    prompts = [key.split("_")[0] for key in balanced(made, queue).keys]
    assert prompts[::2] == prompts[1::2] and len(set(prompts)) == 4


def test_the_shares_of_tokens_that_were_computed_correct_the_mfu(monkeypatch):
    def update(self, batch, metrics):
        shares = {"actor/perf/unique_token_share": 0.25, "actor/perf/trained_token_share": 0.5}
        metrics.update(shares | {"perf/mfu/actor": 0.8})
        return batch

    monkeypatch.setattr(PPOTrainerSync, "_update_actor", update)
    metrics = {}
    assert trainer()._update_actor("batch", metrics) == "batch"
    shares = {"perf/unique_token_share": 0.25, "perf/trained_token_share": 0.5, "perf/mfu/actor": 0.1}
    assert metrics == shares


@pytest.mark.parametrize(("values", "skipped"), table(__file__, "rows left out"))
def test_rows_without_advantages_are_left_out_where_they_add_nothing(monkeypatch, queue, values, skipped):
    monkeypatch.setattr(PPOTrainerSync, "_update_actor", lambda self, batch, metrics: batch)
    keys = {"use_prefix_tree": True, "policy_loss.loss_mode": "vanilla", "entropy_coeff": 0} | values
    batch = trainer(**{f"{ACTOR}.{key}": value for key, value in keys.items()})._update_actor(queue.batch(), {})
    assert batch.extra_info.get(SKIP_ZERO_ADVANTAGES, False) is skipped


def advantages_with(made, queue, batch) -> dict[str, list[float]]:
    """Return the advantages of the real rows, and the metrics."""
    metrics = credited(made, batch)
    real = {key: row["advantages"].tolist() for key, row in queue.rows.items() if not key.startswith("pad")}
    return real | {name: [pytest.approx(value)] for name, value in metrics.items()}


def test_prompts_carry_their_order_and_problem(monkeypatch):
    submitted = []
    monkeypatch.setattr(PPOTrainerSync, "_submit_batch_to_rollout", lambda self, batch: submitted.append(batch))
    made = trainer()
    for step, questions in ((1, ["a", "b", "a"]), (1, ["a"]), (2, ["b"])):
        made.global_steps = step
        made._submit_batch_to_rollout(prompts_of(questions))
    names = (ORDER, PROBLEM, PROMPT_SETTINGS)
    columns = {name: [value for batch in submitted for value in batch[name]] for name in names}
    occurrences = [settings.occurrence for settings in columns[PROMPT_SETTINGS]]
    assert columns[ORDER] == [0, 1, 2, 3, 4] and occurrences == [0, 0, 1, 2, 0]
    a, b, *others = columns[PROBLEM]
    assert a != b and others == [a, a, b]
    of_whole_batches = [key for key in submitted[0].keys() if isinstance(submitted[0].get(key), NonTensorData)]
    assert not {ORDER, PROBLEM, PROMPT_SETTINGS} & {*of_whole_batches}, "upstream would not keep them with a checkpoint"


def test_standardized_entropy_reaches_the_workers_loss(queue, monkeypatch):
    metrics = credited(trainer(**AEPO), queue.batch())
    # a tool's tokens (9.0) and padding (7.0) do not count
    values = [e for _, mask, entropy, _ in ROWS.values() for m, e in zip(mask, entropy, strict=True) if m]
    mean, std = np.mean(values), np.std(values)
    assert metrics["aepo/entropy_mean"] == pytest.approx(mean) and metrics["aepo/entropy_std"] == pytest.approx(std)
    assert metrics["aepo/advantage_grew"] == pytest.approx(np.mean(np.array(values) > mean))

    seen = []
    monkeypatch.setattr(field_losses, "ppo_loss", lambda *arguments: seen.append(STANDARDIZED_ENTROPY.get()))
    keys = ["q_1_0", "p_1_0"]  # a micro-batch
    data = queue.kv_batch_get(keys, "train", [STANDARDIZED_ENTROPY.name, "response_mask"])
    field_losses.ppo_loss_with_fields(None, None, data, fields=[STANDARDIZED_ENTROPY.name])
    z = [[(e - mean) / std * m for m, e in zip(*ROWS[key][1:3], strict=True)] for key in keys]
    torch.testing.assert_close(seen[0], torch.tensor([z[0], z[1] + [0.0] * 3], dtype=torch.float32))


@pytest.mark.parametrize(
    ("values", "components", "fields"),
    [
        (HAPO | {f"{ACTOR}.adaptive_clip": True}, ["NormalizedEntropy"], {"entropy_h"}),
        (HAPO | {f"{ACTOR}.adaptive_advantage": True}, ["NormalizedEntropy"], {"entropy_h"}),
        (TEMPERED, ["NormalizedEntropy"], {"entropy_h"}),
        (AEPO, [], {"standardized_entropy"}),
        (AEPO | TEMPERED, ["NormalizedEntropy"], {"entropy_h", "standardized_entropy"}),
        ({f"{ACTOR}.policy_loss.loss_mode": "aepo"}, [], set()),
        ({"algorithm.adv_estimator": "hapo"}, [], set()),
    ],
)
def test_a_part_brings_the_fields_that_it_needs_whatever_the_trees_are(values, components, fields):
    config = config_of({"algorithm.adv_estimator": "grpo"} | values)
    assert [type(component).__name__ for component in components_of(config)] == components
    assert {field.name for field in computed_fields(config)} == fields


@pytest.mark.parametrize(
    "estimator", ["grpo", "rloo", "opo", "gpg", "grpo_passk", "hapo", "arpo_hard", "tree_path", "tree_gain", "treerl"]
)
@pytest.mark.parametrize("normalized", [True, False])
def test_equal_rewards_give_exactly_0(monkeypatch, estimator, normalized):
    """Equal rewards differ from their float32 mean: upstream's GRPO gives rewards of 0.1 advantages of -0.007."""
    queue = MemoryQueue(monkeypatch)
    for session in range(16):
        queue.add(f"p_{session}_0", 0.1, [1, 1], segment_ids=[0, 1 + session])
        queue.add(f"q_{session}_0", 0.9, [1], segment_ids=[session])
        queue.add(f"r_{session}_0", 0.4 if session else 0.9, [1, 1, 1], segment_ids=[0, 1, 2 + session])
    made = trainer(estimator, **{"algorithm.norm_adv_by_std_in_grpo": normalized})
    made._compute_advantage(queue.batch(), {})
    of_prompt = {prompt: [] for prompt in "pqr"}
    for key, advantages in queue.column("advantages").items():
        of_prompt[key[0]] += advantages
    assert set(of_prompt["p"]) == {0.0} and set(of_prompt["q"]) == {0.0} and any(of_prompt["r"])


def test_an_estimator_that_compares_more_than_outcomes_keeps_its_advantages(queue, monkeypatch):
    for key in queue.rows:
        queue.rows[key]["rm_scores"][-1] = 1.0
        queue.rows[key]["advantages"] = torch.ones(len(queue.rows[key]["response_mask"]))
    monkeypatch.setattr(PPOTrainerSync, "_compute_advantage", lambda self, batch, metrics: batch)
    trainer("reinforce_plus_plus_baseline")._compute_advantage(queue.batch(), {})
    assert all(set(column) == {1.0} for column in queue.column("advantages").values())


def test_the_share_of_responses_at_the_limit_and_tokens_without_padding_rows(queue, monkeypatch):
    """None of the four rows has the limit's 6 tokens; the padding row has 5 tokens."""

    def upstream(self, batch, metrics, *args):
        tokens = sum(tag["prompt_len"] + tag["response_len"] for tag in batch.tags)
        metrics |= {"perf/total_num_tokens": tokens, "perf/throughput": tokens / 10, "response_length/clip_ratio": 0.25}

    monkeypatch.setattr(PPOTrainerSync, "_compute_metrics", upstream)
    for limit, ratio in ((6, 0.0), (5, 0.25), (4, 0.5)):
        metrics = {}
        made = trainer(**{"data.max_response_length": limit})
        made._compute_metrics(queue.batch(), metrics, {}, 1, 0)
        assert metrics["response_length/limit_ratio"] == ratio
        assert metrics["perf/total_num_tokens"] == 5 + 4 + 6 + 2
        assert metrics["perf/throughput"] == pytest.approx(1.7)
