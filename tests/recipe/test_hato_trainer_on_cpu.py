"""HATO's training step around upstream's own, on a TransferQueue in memory; the whole stack is in tests/e2e."""

import pytest
import torch
from omegaconf import OmegaConf
from transfer_queue import KVBatchMeta
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from recipe.hato.hato_trainer import STATE_FILE, HATOTrainer, SearchedTree
from tests.workers.rollout.trees.hato.trees import grown
from verl.workers.rollout.trees.hato.config import HATOConfig, RewardWeights
from verl.workers.rollout.trees.hato.messages import LEAF, TREE_STATE
from verl.workers.rollout.trees.hato.metrics import ReferencePaths
from verl.workers.rollout.trees.hato.rewards import leaf_outcomes, rewards_of
from verl.workers.rollout.trees.hato.step_features import FEATURES
from verl.workers.rollout.trees.hato.value_model import value_model_of

# p: node 1 with leaves 2 (right) and 3 (wrong), leaf 4 (wrong); q: two wrong leaves
SHAPES = {"p": [[1.0, 0.0], 0.0], "q": [0.0, 0.0]}
N = 4
HATO = {
    "reward_weights": {"alpha": 0, "beta": 1, "gamma": 1},
    "uncertainty": {"n_updates": 2},
    "metrics": {"novelty": False},
}


class MemoryQueue:
    def __init__(self):
        self.rows = {}
        for uid, shape in SHAPES.items():
            tree = grown(shape)
            outcomes = {leaf: tree.nodes[leaf].outcome for leaf in tree.leaves()}
            for i, row in enumerate(tree.rows(N)):
                scores = torch.zeros(len(row.mask))
                scores[-1] = outcomes[row.leaf]
                extra = {LEAF: row.leaf}
                if i == 0:
                    features = [[node / 10] * len(FEATURES) for node in range(len(tree.nodes))]
                    structure = tree.structure() | {"outcome": [None] * len(tree.nodes)}
                    extra[TREE_STATE] = {"structure": structure, "features": features}
                self.add(f"{uid}_{i}_0", uid, row.token_ids, row.mask, scores, extra)
        self.add("pad_0_0", "pad", [0, 0], [0, 0], torch.zeros(2), {})

    def add(self, key, uid, tokens, mask, scores, extra):
        row = {"response_mask": torch.tensor(mask), "rm_scores": scores, "old_log_probs": torch.zeros(len(mask))}
        row |= {"prompts": torch.tensor([3]), "responses": torch.tensor(tokens), "uid": uid, "extra_fields": extra}
        self.rows[key] = row

    def batch(self) -> KVBatchMeta:
        keys = sorted(self.rows, key=hash)  # upstream orders rows by length, over ranks
        tags = [{"is_padding": True} if key.startswith("pad") else {} for key in keys]
        return KVBatchMeta(keys=keys, tags=tags, partition_id="train")

    def kv_batch_get(self, keys, partition_id, select_fields):
        fields = [name for name in select_fields if name in self.rows[keys[0]]]
        return list_of_dict_to_tensordict([{name: self.rows[key][name] for name in fields} for key in keys])

    def kv_batch_put(self, keys, partition_id, fields):
        for name in fields.keys():
            for key, value in zip(keys, fields[name].unbind(), strict=True):
                self.rows[key][name] = value
        return self.batch()


@pytest.fixture
def queue(monkeypatch):
    queue = MemoryQueue()
    monkeypatch.setattr("transfer_queue.kv_batch_get", queue.kv_batch_get)
    monkeypatch.setattr("transfer_queue.kv_batch_put", queue.kv_batch_put)
    return queue


def trainer(filters: bool = False, **hato) -> HATOTrainer:
    made = HATOTrainer.__new__(HATOTrainer)
    made.config = OmegaConf.create(
        {
            "algorithm": {
                "adv_estimator": "hato",
                "norm_adv_by_std_in_grpo": False,
                "gamma": 1.0,
                "lam": 1.0,
                "use_kl_in_reward": False,
                "filter_groups": {"enable": filters},
            },
            "actor_rollout_ref": {"rollout": {"n": N, "calculate_log_probs": False, "seed": 0}},
            "trainer": {"tree_freq": -1},
            "data": {"train_batch_size": 3},
        }
    )
    made.hato = HATOConfig.from_dict(HATO | hato)
    made.global_steps, made.total_training_steps = 1, 10
    made.submitted, made.components = {"p": 0, "q": 1}, []
    made.problem_of = {"p": "2 + 2", "q": "3 + 3"}
    made.dropped, made.record, made.references = [], {}, ReferencePaths(8, 8)
    made.value_model = value_model_of(made.hato, 0)
    return made


def trained(queue) -> dict[str, list[float]]:
    """Advantages of the tokens that are trained, by row."""
    return {
        key: [round(a, 4) for a in row["advantages"][row["response_mask"].bool()].tolist()]
        for key, row in queue.rows.items()
    }


def test_advantages_by_hand(queue):
    """R: 1: 1 + (1/2 - 0), 4: 0; 2: 1 + 1, 3: 0; minus the mean of the siblings. Two tokens a node."""
    metrics = {}
    made = trainer()
    made._compute_advantage(queue.batch(), metrics)
    found = trained(queue)
    assert found["p_0_0"] == [0.75, 0.75, 1.0, 1.0]  # nodes 1 and 2
    assert found["p_1_0"] == [-1.0, -1.0] and found["p_2_0"] == [-0.75, -0.75]  # 3; 4
    assert found["p_3_0"] == [], "the first leaf once more: trained already"
    assert found["q_0_0"] == found["q_1_0"] == [0, 0] and found["pad_0_0"] == []
    assert metrics["hato/families"] == 3 and metrics["hato/flat_families"] == pytest.approx(1 / 3)
    assert metrics["hato/reward_path"] == pytest.approx((2 / 4 + 0) / 2) and metrics["hato/trees_kept"] == 2
    assert made.advantages["p"].tolist() == pytest.approx([0, 0.75, 1, -1, -0.75])


def test_filtering_takes_what_tells_nothing_out_of_the_mask(queue):
    trainer(filters=True)._compute_advantage(queue.batch(), {})
    masks = {key: row["response_mask"].tolist() for key, row in queue.rows.items()}
    assert masks["p_0_0"] == [1, 1, 1, 1] and masks["p_1_0"] == [0, 0, 1, 1]
    assert masks["q_0_0"] == masks["q_1_0"] == [0, 0]
    # what upstream's loss divides by
    assert {key: row["loss_mask"].tolist() for key, row in queue.rows.items()} == masks


def test_the_value_model_learns_from_kept_and_dropped_trees_in_the_order_of_the_data(queue):
    made, seen = trainer(), []
    made.value_model.observe = lambda features, outcomes: seen.extend(
        (round(f[0] * 10), outcome) for f, outcome in zip(features, outcomes, strict=True)
    )
    made.dropped = made._fetch_trees([f"q_{i}_0" for i in range(N)], "train")
    for key in [key for key in queue.rows if key.startswith("q")]:
        del queue.rows[key]
    made._compute_advantage(queue.batch(), {})
    assert seen == [(1, 0.5), (2, 1.0), (3, 0.0), (4, 0.0), (1, 0.0), (2, 0.0)]
    assert made.record == {"2 + 2": (4, 1.0), "3 + 3": (2, 0.0)}


def test_nodes_go_where_trees_told_something(queue):
    made = trainer(tree={"max_nodes": 25}, exploration={"nodes_per_tree": 10, "ucb_coef": 0.5})
    made.record = {"told": (5, 1.0), "silent": (5, 0.0)}
    grants = made._shared_nodes(["told", "silent", "new"])
    assert sum(grants) <= 30 and min(grants) >= 2 and max(grants) <= 25
    assert grants[0] > 2 * grants[1] and grants[2] > 2 * grants[1], "a new problem may tell something"
    assert made._shared_nodes(["told", "silent"]) == [10, 10], "replacements get the average"
    made.record = {}
    assert made._shared_nodes(["a", "b", "c"]) == [10, 10, 10]


def test_what_a_tree_told(queue):
    """Neither a tree that is one chain nor one whose steps differ in R_local alone tells anything."""
    weights = {"alpha": 0.1, "beta": 0.7, "gamma": 0.2}
    trees = trainer(reward_weights=weights)._fetch_trees([f"{uid}_{i}_0" for uid in "pq" for i in range(N)], "train")
    made = trainer(reward_weights=weights).hato.reward_weights
    told, silent = trees
    for node, step in enumerate(silent.tree.nodes):
        step.local_reward = node / 10
    silent = silent._replace(rewards=rewards_of(silent.tree, silent.outcomes, made, "best"))
    assert silent.rewards.total[1] != silent.rewards.total[2], "two wrong leaves"
    assert told.share_of_varying_families(made) == 1 and silent.share_of_varying_families(made) == 0
    local_alone = RewardWeights(alpha=1, beta=0, gamma=0)
    rewards = rewards_of(silent.tree, silent.outcomes, local_alone, "best")
    assert silent._replace(rewards=rewards).share_of_varying_families(local_alone) == 1
    chain = grown([0.0])
    outcomes = leaf_outcomes(chain, 0.5)
    rewards = rewards_of(chain, outcomes, made, "best")
    assert SearchedTree("p", chain, [], rewards, outcomes, {}).share_of_varying_families(made) == 0


def test_the_metrics_do_not_take_a_heuristic_for_a_signal(queue):
    for row in queue.rows.values():
        if TREE_STATE in row["extra_fields"]:
            columns = row["extra_fields"][TREE_STATE]["structure"]
            columns["local_reward"] = [node / 10 for node in range(len(columns["parent"]))]
    metrics = {}
    trainer(reward_weights={"alpha": 0.1, "beta": 0.7, "gamma": 0.2})._compute_advantage(queue.batch(), metrics)
    assert metrics["hato/flat_families"] == pytest.approx(1 / 3), "that of the two wrong leaves"


def test_meta_learning_calls_the_workers_around_the_update(queue, monkeypatch):
    calls = []

    class Workers:
        def __getattr__(self, name):
            return lambda **settings: calls.append((name, settings)) or [{"meta/inner_distance": 0.5}]

    made = trainer(meta_learning={"enable": True, "method": "maml", "n_inner_steps": 2, "inner_lr": 0.3})
    made.actor_rollout_wg = Workers()
    monkeypatch.setattr(
        "verl.trainer.ppo.v1.explore_trainer.ExploreTrainer._update_actor",
        lambda self, batch, metrics: calls.append(("update", {})) or batch,
    )
    told = {}
    for made.global_steps in range(1, 7):
        metrics = {}
        made._update_actor(queue.batch(), metrics)
        told[made.global_steps] = metrics
    settings = {"method": "maml", "meta_lr": 0.1, "inner_lr": 0.3}
    episode = [("meta_begin", settings), ("update", {}), ("update", {}), ("meta_query", {}), ("update", {})]
    episode += [("meta_end", {})]
    assert calls == episode * 2
    assert [step for step, metrics in told.items() if metrics] == [3, 6]


def test_the_state_comes_back(queue, monkeypatch, tmp_path):
    made = trainer(metrics={"novelty": True})
    made._compute_advantage(queue.batch(), {})
    for one in (made, other := trainer()):
        one.config.trainer.update({"default_local_dir": str(tmp_path), "resume_mode": "auto"})
        one.global_steps = 7
    base = "verl.trainer.ppo.v1.explore_trainer.ExploreTrainer."
    monkeypatch.setattr(base + "_save_checkpoint", lambda self: None)
    monkeypatch.setattr(base + "_load_checkpoint", lambda self: None)
    made._save_checkpoint()
    assert [path.name for path in (tmp_path / "global_step_7").iterdir()] == [STATE_FILE]
    other._load_checkpoint()
    probe = [[0.3] * len(FEATURES)]
    for model in (made.value_model, other.value_model):
        model.observe(probe, [1.0])
    assert torch.equal(made.value_model.predict(probe)[0], other.value_model.predict(probe)[0])
    assert other.record == made.record
    assert other.references.of("2 + 2") == [[1, 1001, 2, 1002], [1, 1001, 3, 1003], [4, 1004]]
    other.hato = trainer(uncertainty={"method": "dropout"}).hato
    with pytest.raises(ValueError, match="hato.uncertainty.method was ensemble in the checkpoint and is dropout"):
        other._load_checkpoint()
    other.hato = trainer(meta_learning={"enable": True, "n_inner_steps": 4}).hato
    with pytest.raises(ValueError, match="hato.meta_learning was .* step 7 lies within an episode"):
        other._load_checkpoint()
    other.hato = trainer(meta_learning={"enable": True, "n_inner_steps": 7}).hato
    other._load_checkpoint()


def test_a_dropped_tree_is_a_problems_first_visit_too(queue):
    made = trainer(metrics={"novelty": True})
    made._keep_dropped([f"q_{i}_0" for i in range(N)])
    assert [tree.uid for tree in made.dropped] == ["q"]
    assert made.references.of("3 + 3") == [[1, 1001], [2, 1002]] and made.references.of("2 + 2") == []


def test_rdi_and_novelty(queue):
    made, first, again = trainer(metrics={"novelty": True}), {}, {}
    made._compute_advantage(queue.batch(), first)
    assert "hato/novelty" not in first and "hato/rdi" not in first, "one right path, seen for the first time"
    for key in ("p_0_0", "p_3_0"):  # the same leaf
        queue.rows[key]["responses"] = torch.tensor([7, 8, 2, 1002])
    made._compute_advantage(queue.batch(), again)
    assert again["hato/novelty"] == 0.5
    rows = [{"responses": tokens, "reward": reward, "answer": None} for tokens, reward in (([1, 2], 1), ([1, 3], 1))]
    assert made._diversity({"p": [*rows, {"responses": [9, 9], "reward": 0, "answer": None}]})["hato/rdi"] == 0.5


def test_the_value_model_does_not_learn_in_the_order_in_which_trees_were_dropped(queue):
    seen = []
    for order in ((0, 1), (1, 0)):
        made = trainer()
        trees = [made._fetch_trees([f"{uid}_{i}_0" for i in range(N)], "train")[0] for uid in ("p", "q")]
        made.dropped = [trees[i] for i in order]
        made.value_model.observe = lambda features, outcomes: seen.append(features)
        made._learn(sorted(made.dropped, key=lambda tree: made.submitted[tree.uid]))
    assert seen[0] == seen[1]
