"""The engine with and without prefix tree on one and on two FSDP2 ranks (gloo): the same values, losses and gradients.

The ranks are processes with upstream's engine, a tiny Qwen2 and a mini-batch of two groups each.
"""

import sys

import pytest
import torch

from benchmarks.fsdp2_step import CASE, make_data, make_engine, mini_batch, run, write_model

pytestmark = pytest.mark.slow

# name -> what differs from CASE
CASES = {
    "vanilla": {},
    "hapo": {"loss": "hapo", "loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 7},
    "aepo": {"loss": "aepo", "entropy_chunks": True, "temperatures": (1.0, 0.6)},
    "micro_batches": {"max_tokens": 37},
    "recomputed": {"checkpointing": True, "loss_agg_mode": "seq-mean-token-mean"},
    "lora": {"lora_rank": 4},
}
# losses of which rows without advantages are left out: all but three of both groups on rank 0, all but one on rank 1
SKIPPING = {name: {"loss": name, "skip": True, "max_tokens": 27} for name in ("vanilla", "hapo", "aepo")}
SKIPPING["hapo"]["loss_agg_mode"] = "seq-mean-token-sum"


@pytest.fixture(scope="module", params=[1, 2], ids=["one_rank", "two_ranks"])
def results(request, tmp_path_factory):
    from tests.forked import results_of_ranks  # the ranks have no tests

    return results_of_ranks(request.param, __file__, tmp_path_factory.mktemp("engines"))


@pytest.mark.parametrize("name", CASES)
def test_as_rows(results, name):
    for of_rank in results:
        rows, tree = of_rank[name]["rows"], of_rank[name]["tree"]
        assert (rows["engine"], tree["engine"]) == ("FSDPEngineWithLMHead", "PrefixTreeEngine")
        for key in ("log_probs", "entropy", "inferred"):
            torch.testing.assert_close(tree[key], rows[key], rtol=1e-5, atol=1e-5)
        assert tree["metrics"].keys() >= rows["metrics"].keys()
        for key, value in rows["metrics"].items():
            if name == "micro_batches" and "loss" not in key:
                continue  # upstream's means of micro-batches' means, which depend on the cut
            assert tree["metrics"][key] == pytest.approx(value, rel=1e-4, abs=1e-6), key
        assert tree["loss"] == pytest.approx(rows["loss"], rel=1e-4, abs=1e-6)
        assert rows["gradient"].norm() > 1e-3
        assert (tree["gradient"] - rows["gradient"]).norm() < 1e-5 * rows["gradient"].norm()


def test_shared_tokens_are_computed_once(results):
    for of_rank in results:
        in_inference_and_training = of_rank["vanilla"]["tree"]["lm_head_tokens"]
        assert in_inference_and_training == [of_rank["unique_tokens"]] * 2
        share = of_rank["vanilla"]["tree"]["metrics"]["perf/unique_token_share"]
        assert share == pytest.approx(of_rank["unique_tokens"] / of_rank["tokens"])
        assert len(of_rank["micro_batches"]["tree"]["lm_head_tokens"]) == 4  # two micro-batches each, on every rank
        assert of_rank["unique_tokens"] < 0.7 * of_rank["tokens"]


@pytest.mark.parametrize("name", SKIPPING)
def test_rows_without_advantages_are_left_out_exactly(results, name):
    ranks = [of_rank["skip_" + name] for of_rank in results]
    for rank, of_rank in enumerate(ranks):
        rows, tree = of_rank["rows"], of_rank["tree"]
        assert tree["loss"] == pytest.approx(rows["loss"], rel=1e-4, abs=1e-6)
        assert rows["gradient"].norm() > 1e-3
        assert (tree["gradient"] - rows["gradient"]).norm() < 1e-5 * rows["gradient"].norm()
        assert 0 < tree["metrics"]["perf/trained_token_share"] < (0.5, 0.2)[rank]
        assert sum(tree["trained_tokens"]) < 0.5 * sum(rows["trained_tokens"])
    assert len({len(of_rank["tree"]["trained_tokens"]) for of_rank in ranks}) == 1  # ranks wait for each other
    assert len(ranks[0]["tree"]["trained_tokens"]) == 2


def on_a_rank(folder: str) -> None:
    import torch.distributed as dist
    import verl.trainer.ppo.core_algos  # noqa: F401 (losses and their fields)
    from verl.utils.distributed import initialize_global_process_group_ray

    from verl.workers.engine.prefix_tree.trie import build_trie

    initialize_global_process_group_ray()
    if dist.get_rank() == 0:
        write_model(folder)
    dist.barrier()
    rows = [prompt + response for prompt, response in zip(*mini_batch(dist.get_rank()), strict=True)]
    results: dict = {"tokens": sum(map(len, rows)), "unique_tokens": len(build_trie(rows))}
    for name, changes in (CASES | {"skip_" + name: case for name, case in SKIPPING.items()}).items():
        case = CASE | changes
        results[name] = {}
        for update, use_prefix_tree in (("rows", False), ("tree", True)):
            torch.manual_seed(0)  # LoRA's matrices
            engine, actor = make_engine(folder, case, use_prefix_tree)
            data = make_data(dist.get_rank(), dist.get_world_size(), case)
            results[name][update] = run(engine, actor, data)
    torch.save(results, f"{folder}/{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    on_a_rank(sys.argv[1])
