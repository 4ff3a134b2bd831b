"""HATO's components in upstream's own step, on rows made by hand; the whole stack is in tests/e2e."""

import json
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from recipe.common.tiny_model import make_tokenizer
from recipe.hato.component import HATOCredit, HATOSearch, SuccessfulPaths
from recipe.hato.meta_component import MetaLearning
from recipe.hato.search import NodeBudget
from recipe.hato.value_model import FEATURES, KeptSteps, SearchState, StepEstimate, unpack
from tests.trainer.ppo.toy_step import ROLLOUT, MemoryQueue, credited, prompts_of, trainer_of
from verl.trainer.ppo.v1.batch_rows import PROBLEM
from verl.trainer.ppo.v1.tree_buffer import TreeBuffer
from verl.utils import tensordict_utils as tu
from verl.workers.rollout.prompt_task import PROMPT_SETTINGS, STEP_SETTINGS
from verl.workers.rollout.trajectory_tree import TREE, TREE_DATA, TREE_METRICS, Segment, SegmentInfo, TrajectoryTree

# prompt -> its rows (reward, segment of each token). p: step 0 with a right and a wrong leaf, 1 and 2, and a wrong
# leaf, 3; q: two wrong leaves. Upstream's padding rows are copies of the first row.
TREES = {"p": [(1.0, [0, 0, 1, 1]), (0.0, [0, 0, 2, 2]), (0.0, [3, 3])], "q": [(0.0, [0, 0]), (0.0, [1, 1])]}
HATO = {
    "reward_weights": {"alpha": 0, "beta": 1, "gamma": 1},
    "uncertainty": {"n_updates": 2},
    "meta_learning": {"enable": False},
}
FILTERS = {"enable": True, "metric": "acc", "max_num_gen_batches": 10}


def tree_of(uid: str) -> TrajectoryTree:
    """The tree that the rows are of; every segment's two tokens are its own."""
    tree = TrajectoryTree([3])
    for _, ids in TREES[uid]:
        above = None
        for segment in dict.fromkeys(ids):
            if segment == len(tree.segments):
                tree.add(Segment(above, [10 * segment, 10 * segment + 1], [-1.0, -1.0]))
            above = segment
        tree.leaves.append(above)
    return tree


@pytest.fixture
def queue(monkeypatch):
    queue = MemoryQueue(monkeypatch)
    for order, uid in enumerate(TREES):
        tree = tree_of(uid)
        n_steps = len(tree.segments)
        about = {
            TREE_METRICS: {"tokens_generated": 2.0 * n_steps},
            TREE: tree.to_json(),
            TREE_DATA: pickle.dumps(
                KeptSteps({step: StepEstimate([(step + 1) / 10] * len(FEATURES), 0.5) for step in range(n_steps)})
            ),
        }
        for i, (reward, ids) in enumerate(TREES[uid]):
            own = {"segment_ids": ids, "local_rewards": [0.1 * s for s in ids], "draws": [1] * len(ids)}
            own |= {"responses": tree.trajectories()[i], "extra_fields": about if i == 0 else {}}
            queue.add(f"{uid}_{i}_0", reward, [1] * len(ids), order, **own)
    for i in range(2):
        copied = {name: queue.rows["p_0_0"][name] for name in ("segment_ids", "local_rewards", "draws", "extra_fields")}
        queue.add(f"pad_{i}_0", 0.0, [0], 0, {"is_padding": True}, **copied)
    return queue


def trainer(hato: dict | None = None, credit: str = "hato", **values):
    return trainer_of(
        {
            f"{ROLLOUT}.tree": "hato",
            "algorithm.adv_estimator": credit,
            "algorithm.norm_adv_by_std_in_grpo": False,
            "data.train_batch_size": 3,
            "hato": HATO | (hato or {}),
        }
        | values
    )


def component(made, kind: type):
    return next(own for own in made.components if isinstance(own, kind))


def rounded(column: dict[str, list[float]]) -> dict[str, list[float]]:
    return {key: [round(value, 4) for value in values] for key, values in column.items()}


# R: 0: 1 + (1/2 - 0), 3: 0; 1: 1 + 1, 2: 0; minus the mean of the siblings; step 0 is in two rows
ADVANTAGES = {
    "p_0_0": [0.375, 0.375, 1.0, 1.0],
    "p_1_0": [0.375, 0.375, -1.0, -1.0],
    "p_2_0": [-0.75, -0.75],
    **{"q_0_0": [0.0, 0.0], "q_1_0": [0.0, 0.0], "pad_0_0": [0.0], "pad_1_0": [0.0]},
}


def test_advantages_by_hand(queue):
    metrics = credited(trainer(), queue.batch())
    assert rounded(queue.column("advantages")) == ADVANTAGES
    assert metrics["hato/reward_path"] == pytest.approx(((1 + 1 + 0 + 0) / 4 + 0) / 2)
    assert metrics["hato/reward_local"] == pytest.approx(((0 + 0.1 + 0.2 + 0.3) / 4 + 0.1 / 2) / 2)
    assert metrics["hato/accuracy"] == pytest.approx((1 / 3 + 0) / 2)
    assert metrics["hato/trees_kept"] == 2 and metrics["hato/trees_dropped"] == 0
    assert metrics["tree/prompts"] == 2 and metrics["tree/tokens_generated"] == (8 + 4) / 2


def test_hatos_credit_on_other_trees(queue):
    for row in queue.rows.values():
        del row["local_rewards"], row["draws"]
        row["extra_fields"] = {}
    made = trainer(**{f"{ROLLOUT}.tree": "arpo"})
    assert [type(own) for own in made.components] == [HATOCredit, MetaLearning, SuccessfulPaths]
    metrics = credited(made, queue.batch())
    assert rounded(queue.column("advantages")) == ADVANTAGES
    assert metrics["hato/reward_local"] == 0 and "hato/accuracy" not in metrics


def test_trees_for_the_viewer(queue, tmp_path):
    made = trainer(**{"trainer.tree_freq": 1, "trainer.default_local_dir": str(tmp_path)})
    made.tokenizer = make_tokenizer()
    credited(made, queue.batch())
    records = [json.loads(line) for line in (tmp_path / "trees/step_000001.jsonl").read_text().splitlines()]
    assert [record["uid"] for record in records] == ["p", "q"] and records[0]["rewards"] == [1.0, 0.0, 0.0]
    info = [segment["info"] for segment in records[0]["segments"]]
    assert [about["advantage"] for about in info] == pytest.approx([0.75, 1.0, -1.0, -0.75])
    assert [about["R_total"] for about in info] == [1.5, 2.0, 0.0, 0.0]
    assert [about["R_local"] for about in info] == pytest.approx([0.0, 0.1, 0.2, 0.3])


def test_filtering_takes_what_does_not_vary_out_of_the_mask(queue):
    credited(trainer(**{"algorithm.filter_groups": FILTERS}), queue.batch())
    masks = queue.column("response_mask")
    assert masks["p_0_0"] == [1, 1, 1, 1] and masks["p_2_0"] == [1, 1]
    assert masks["q_0_0"] == masks["q_1_0"] == [1, 1], "an update without a token would have the loss 0 / 0"
    assert queue.column("loss_mask") == masks, "upstream's loss divides by its tokens"


def observed(made) -> list[tuple[int, float]]:
    """Return a list that records what the value model learns from, as (feature of the step, outcome)."""
    seen = []
    component(made, HATOSearch).value_model.observe = lambda features, outcomes: seen.extend(
        (round(row[0] * 10), outcome) for row, outcome in zip(features, outcomes, strict=True)
    )
    return seen


@pytest.mark.parametrize("dropped", ["p", "q"])
def test_the_value_model_learns_from_kept_and_dropped_trees_in_the_order_of_the_data(queue, dropped):
    made = trainer(**{"algorithm.filter_groups": FILTERS})
    assert isinstance(made.replay_buffer, TreeBuffer)
    seen = observed(made)
    made.replay_buffer.on_drop(queue.batch(dropped))
    for key in [key for key in queue.rows if key.startswith(dropped)]:
        del queue.rows[key]
    metrics = credited(made, queue.batch())
    assert seen == [(1, 0.5), (2, 1.0), (3, 0.0), (4, 0.0), (1, 0.0), (2, 0.0)]
    assert component(made, HATOSearch).record == {"problem of p": (4, 1.0), "problem of q": (2, 0.0)}
    assert metrics["hato/trees_dropped"] == 1
    assert metrics["tree/tokens_generated"] == 12, "of both, for one that is kept"
    assert metrics["hato/accuracy"] == pytest.approx(1 / 6)


def test_a_rollout_that_hides_its_steps_is_an_error(queue):
    del queue.rows["q_0_0"]["extra_fields"][TREE_DATA]
    with pytest.raises(ValueError, match="the rows of prompt q hold None of their tree, and no KeptSteps"):
        credited(trainer(), queue.batch())


def test_nodes_go_where_trees_said_something():
    made = trainer({"tree": {"max_nodes": 25}, "exploration": {"nodes_per_tree": 10, "ucb_coef": 0.5}})
    search = component(made, HATOSearch)
    search.record = {"varied": (5, 1.0), "silent": (5, 0.0)}
    grants = search.shared_nodes(["varied", "silent", "new"])
    assert sum(grants) == 30 and min(grants) >= 2 and max(grants) <= 25
    assert grants[0] > 2 * grants[1] and grants[2] > 2 * grants[1], "a new problem may say something"
    assert search.shared_nodes(["varied", "silent"]) == [10, 10], "replacements get the average"
    search.record = {}
    assert search.shared_nodes(["a", "b", "c"]) == [10, 10, 10]


def submitted(made, monkeypatch):
    """The batch of three prompts as it goes to the rollout."""
    batches = []
    monkeypatch.setattr(PPOTrainerSync, "_submit_batch_to_rollout", lambda self, batch: batches.append(batch))
    made._submit_batch_to_rollout(prompts_of("012"))
    return batches[0]


def test_prompts_carry_budget_temperature_and_value_model_to_the_search(queue, monkeypatch):
    made = trainer({"exploration": {"nodes_per_tree": 10, "temperature_decay": 1.0}})
    made.global_steps = 6
    first = submitted(made, monkeypatch)
    state = tu.get_non_tensor_data(first, STEP_SETTINGS, None).tree_record(SearchState)
    assert state.learnt == 0 and state.temperature == pytest.approx(np.exp(-0.5))
    assert made.config.actor_rollout_ref.rollout.temperature == state.temperature, "the loss sees the same policy"
    budgets = [each.tree_record(NodeBudget).max_nodes for each in first[PROMPT_SETTINGS]]
    assert budgets == [10, 10, 10] and len(set(first[PROBLEM])) == 3
    credited(made, queue.batch())
    sent, model = unpack(state.value_model), component(made, HATOSearch).value_model
    # the same step: a schedule may update several times in one
    state = tu.get_non_tensor_data(submitted(made, monkeypatch), STEP_SETTINGS, None).tree_record(SearchState)
    assert state.learnt == 1
    again = unpack(state.value_model)
    assert not len(sent["memory"]["outcomes"]) and "optimizer" not in sent
    assert torch.equal(again["memory"]["outcomes"], model.outcomes_M) and len(model.outcomes_M) == 6


def test_meta_learning_calls_the_workers_around_the_update(queue, monkeypatch):
    calls = []

    class Workers:
        def __getattr__(self, name):
            return lambda **settings: calls.append((name, settings)) or [{"meta/inner_distance": 0.5}]

    made = trainer({"meta_learning": {"enable": True, "method": "maml", "n_inner_steps": 2, "inner_lr": 0.3}})
    made.actor_rollout_wg = Workers()
    update = lambda self, batch, metrics: calls.append(("update", {})) or batch  # noqa: E731
    monkeypatch.setattr(PPOTrainerSync, "_update_actor", update)
    metrics_of = {}
    for made.global_steps in range(1, 7):
        metrics_of[made.global_steps] = {}
        made._update_actor(queue.batch(), metrics_of[made.global_steps])
    settings = {"method": "maml", "meta_lr": 0.1, "inner_lr": 0.3}
    episode = [("meta_begin", settings), ("update", {}), ("update", {}), ("meta_query", {}), ("update", {})]
    episode += [("meta_end", {})]
    assert calls == episode * 2
    assert [step for step, metrics in metrics_of.items() if "meta/inner_distance" in metrics] == [3, 6]


def test_rdi_and_novelty(queue):
    made = trainer()
    first = credited(made, queue.batch())
    assert "hato/novelty" not in first and "hato/rdi" not in first, "one right path, seen for the first time"
    references = component(made, SuccessfulPaths).references
    assert references.of("problem of p") == [[0, 1, 10, 11], [0, 1, 20, 21], [30, 31]]
    queue.rows["p_0_0"]["responses"] = torch.tensor([7, 8, 10, 11])
    queue.rows["p_1_0"]["rm_scores"][-1] = 1.0
    again = credited(made, queue.batch())
    assert again["hato/novelty"] == (0.5 + 0.0) / 2 and again["hato/rdi"] == 1.0


def meta_learning_loader(steps: int, domains: list[str]):
    """The loader of prompts, of four domains' rows by number, for so many training steps."""
    made = trainer(
        {"meta_learning": {"enable": True, "n_inner_steps": 2}},
        **{"data.train_batch_size": 2, "data.dataloader_num_workers": 0},
    )
    made.total_training_steps = steps
    made.train_dataset = ToyDataset(domains)
    made.train_dataloader = SimpleNamespace(batch_size=2)
    return component(made, MetaLearning).train_dataloader(made)


class ToyDataset(list):
    """Rows that are their own number; with the table that upstream's data set has."""

    def __init__(self, domains: list[str]):
        super().__init__({"domain": domain} for domain in domains)
        self.dataframe = {"data_source": domains}


def test_an_episode_has_one_domain_and_runs_have_whole_episodes():
    domains = [domain for batch in meta_learning_loader(4, ["a", "b"] * 8) for domain in batch["domain"]]
    assert len(domains) == 16
    for episode in range(0, 16, 4):  # two steps of two prompts
        assert len(set(domains[episode : episode + 4])) == 1
    with pytest.raises(ValueError, match="5 training steps are not whole .* set trainer.total_training_steps=4"):
        meta_learning_loader(5, ["a", "b"] * 8)
    with pytest.raises(ValueError, match="all 4 rows of data.train_files have the data_source a"):
        meta_learning_loader(4, ["a"] * 4)


# ---- rows of dropped steps ----

DROPPING = {
    "tree": {"train_dropped": True},
    "exploration": {"pruning_threshold": 0.3},
    "reward_weights": {"alpha": 0, "beta": 1, "gamma": 1},
}


@pytest.fixture
def dropped(queue):
    """The queue with two more rows of p: a step after the right answer's first one, and one after the prompt."""
    fields = {"local_rewards": [0.0] * 4, "draws": [1] * 4, "responses": [0, 1, 40, 41]}
    queue.add("p_3_0", 0.0, [1] * 4, 0, segment_ids=[0, 0, 4, 4], dropped=[0, 0, 1, 1], **fields)
    fields = {name: values[:2] for name, values in fields.items()} | {"responses": [50, 51]}
    queue.add("p_4_0", 0.0, [1] * 2, 0, segment_ids=[5, 5], dropped=[1, 1], **fields)
    for row in queue.rows.values():
        row.setdefault("dropped", torch.zeros(len(row["response_mask"]), dtype=torch.int64))
    return queue


@pytest.mark.parametrize(
    "credit", ["hato", "grpo", "hapo", "arpo_hard", "tree_path", "tree_gain", "treerl", "tree_grpo"]
)
def test_every_credit_takes_dropped_rows_as_wrong_ones(dropped, credit):
    """Dropped rows get the advantages of rows whose answer got 0 from the verifier."""
    credited(trainer(DROPPING, credit), dropped.batch())
    actual = dropped.column("advantages")
    for row in dropped.rows.values():
        row["dropped"] *= 0
    credited(trainer(DROPPING, credit), dropped.batch())
    assert rounded(actual) == rounded(dropped.column("advantages"))
    assert max(actual["p_3_0"][2:]) < 0 and max(actual["p_4_0"]) < 0 < min(actual["p_0_0"][2:])


@pytest.mark.parametrize("filtered", [False, True])
def test_the_value_model_learns_from_answers_alone(dropped, filtered):
    made = trainer(DROPPING, **({"algorithm.filter_groups": FILTERS} if filtered else {}))
    seen = observed(made)
    if filtered:
        made.replay_buffer.on_drop(dropped.batch("p"))
    metrics = credited(made, dropped.batch(*(["q", "pad"] if filtered else [])))
    assert sorted(seen) == sorted([(1, 0.5), (2, 1.0), (3, 0.0), (4, 0.0), (1, 0.0), (2, 0.0)])
    assert metrics["hato/accuracy"] == pytest.approx((1 / 3 + 0) / 2), "of answers"


def test_metrics_of_answers_do_not_count_dropped_rows(queue, dropped):
    metrics = credited(made := trainer(DROPPING), dropped.batch())
    assert metrics["hato/answer_score"] == pytest.approx(1 / 5)
    assert component(made, SuccessfulPaths).references.of("problem of p") == [[0, 1, 10, 11], [0, 1, 20, 21], [30, 31]]
    for key in ("p_3_0", "p_4_0"):
        del dropped.rows[key]
    without = credited(trainer(), dropped.batch())
    of_answers = [name for name in without if name.startswith("diversity/")]
    assert of_answers and all(metrics[name] == without[name] for name in of_answers)
    assert "hato/answer_score" not in without


def test_the_viewer_gets_no_reward_for_a_dropped_row(dropped, tmp_path):
    tree = tree_of("p")
    for above, number in ((0, 4), (None, 5)):
        info = SegmentInfo(fields={"dropped": 1}, notes={"pruned": "dropped by the search, trained as wrong"})
        tokens = [10 * number, 10 * number + 1]
        tree.leaves.append(tree.add(Segment(above, tokens, [-1.0] * 2, info=info)))
    dropped.rows["p_0_0"]["extra_fields"][TREE] = tree.to_json()
    made = trainer(DROPPING, **{"trainer.tree_freq": 1, "trainer.default_local_dir": str(tmp_path)})
    made.tokenizer = make_tokenizer()
    credited(made, dropped.batch())
    first, *_ = [json.loads(line) for line in (tmp_path / "trees/step_000001.jsonl").read_text().splitlines()]
    assert first["rewards"] == [1.0, 0.0, 0.0, None, None]
    assert [segment["info"]["advantage"] < 0 for segment in first["segments"][4:]] == [True, True]
