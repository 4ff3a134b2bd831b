"""The engine with and without prefix tree on one and on two FSDP2 ranks (gloo): the same values, losses and gradients.
With contexts of their own, turns have those of a model that reads each token after its own context, token by token.

The ranks are processes with upstream's engine, a tiny Qwen2 and a mini-batch of two groups each.
"""

import random
import sys

import pytest
import torch

from tests.workers.engine.engine_case import CASE, make_data, make_engine, mini_batch, run, write_model

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
# turns that read contexts of their own
WITH_CONTEXTS = {
    "vanilla": {},
    "rollouts_count_alike": {"loss_agg_mode": "seq-mean-token-mean", "temperatures": (1.0, 0.6)},
    "sums": {"loss_agg_mode": "seq-mean-token-sum"},
    "hapo": {"loss": "hapo", "loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 7},
    "gspo": {"loss": "gspo", "loss_agg_mode": "seq-mean-token-mean"},
    "micro_batches": {"max_tokens": 40},
}


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


@pytest.mark.parametrize("name", WITH_CONTEXTS)
def test_as_token_by_token(results, name):
    for of_rank in results:
        slow, tree = of_rank["contexts_" + name]["slow"], of_rank["contexts_" + name]["tree"]
        assert tree["engine"] == "PrefixTreeEngine"
        torch.testing.assert_close(tree["log_probs"][slow["trained"]], slow["log_probs"], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(tree["entropy"][slow["places"]], slow["entropy"], rtol=1e-5, atol=1e-5)
        assert tree["loss"] == pytest.approx(slow["loss"], rel=1e-4, abs=1e-6)
        assert slow["gradient"].norm() > 1e-3
        assert (tree["gradient"] - slow["gradient"]).norm() < 1e-5 * slow["gradient"].norm()
        assert of_rank["contexts_" + name]["without_contexts"] > 1e-2, "contexts change the gradient"


def test_shared_beginnings_of_sequences_are_computed_once(results):
    for of_rank in results:
        assert set(of_rank["contexts_vanilla"]["tree"]["lm_head_tokens"]) == {of_rank["distinct_tokens"]}
        assert len(of_rank["contexts_micro_batches"]["tree"]["lm_head_tokens"]) > 2


# ---- on a rank ----


def contexts_of(rank: int) -> list[list]:
    """Contexts of the mini-batch's rows: up to two, of which some begin alike; the end of one row is not trained."""
    from verl.workers.rollout.contexts import Context

    rng, actual = random.Random(rank + 7), []
    begin = [rng.randrange(90) for _ in range(4)]
    for row, (prompt, response) in enumerate(zip(*mini_batch(rank), strict=True)):
        places = sorted(rng.sample(range(1, len(response)), row % 3))
        own = [Context(len(prompt) + at, begin + [rng.randrange(90) for _ in range(rng.randrange(4))]) for at in places]
        if row == 5:
            own = [*own[:1], Context(len(prompt) + len(response) - 2, None)]
        actual.append(own)
    return actual


def with_contexts(data, contexts):
    """The mini-batch with its contexts; tokens that are not trained have mask 0."""
    from verl.workers.rollout.contexts import CONTEXTS, contexts_cell

    def nested(rows):
        return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)

    data[CONTEXTS] = nested(torch.from_numpy(contexts_cell(own)) for own in contexts)
    for name in ("response_mask", "loss_mask"):
        rows = [row.clone() for row in data[name].unbind()]
        for row, prompt, own in zip(rows, data["prompts"].unbind(), contexts, strict=True):
            if own and own[-1].ids is None:
                row[own[-1].start - (len(prompt) if name == "response_mask" else 0) :] = 0
        data[name] = nested(rows)
    return data


def token_by_token(folder: str, actor, data, contexts, case) -> dict:
    """The loss of upstream's function and its gradient over all ranks, each token read after its own context."""
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM

    from verl.utils import tensordict_utils as tu
    from verl.utils.token_fields import FIELDS
    from verl.workers.utils.field_losses import ppo_loss_with_fields

    model = AutoModelForCausalLM.from_pretrained(f"{folder}/model", dtype=torch.float32, attn_implementation="sdpa")
    outputs, places, at = {"log_probs": [], "entropy": []}, [], 0
    rows = zip(data["input_ids"].unbind(), data["prompts"].unbind(), contexts, strict=True)
    for number, (row, prompt, own) in enumerate(rows):
        temperature = case["temperatures"][number % len(case["temperatures"])]
        log_probs, entropies = [torch.zeros(())] * len(row), [torch.zeros(())] * len(row)
        for place in range(len(prompt), len(row)):
            earlier = [context for context in own if context.start <= place]
            if earlier and earlier[-1].ids is None:
                continue
            read = [*earlier[-1].ids, *row[earlier[-1].start : place].tolist()] if earlier else row[:place].tolist()
            log_p = (model(torch.tensor([read])).logits[0, -1] / temperature).log_softmax(-1)
            log_probs[place - 1], entropies[place - 1] = log_p[row[place]], -(log_p.exp() * log_p).sum()
            places.append(at + place - 1)
        outputs["log_probs"].append(torch.stack(log_probs))
        outputs["entropy"].append(torch.stack(entropies))
        at += len(row)
    nested = {name: torch.nested.as_nested_tensor(rows, layout=torch.jagged) for name, rows in outputs.items()}
    n_tokens = data["loss_mask"].values().sum()
    dist.all_reduce(n_tokens)
    tu.assign_non_tensor(data, batch_num_tokens=n_tokens.item(), dp_size=dist.get_world_size())
    loss, _ = ppo_loss_with_fields(actor, nested, data, fields=list(FIELDS))
    loss.backward()
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    dist.all_reduce(gradient)
    keep = torch.ones(at, dtype=torch.bool)
    keep[data["input_ids"].offsets()[1:] - 1] = False
    trained = torch.zeros(at, dtype=torch.bool)
    trained[places] = True
    return {
        "log_probs": torch.cat(outputs["log_probs"]).detach()[places],
        "entropy": torch.cat(outputs["entropy"]).detach()[places],
        "places": places,
        "trained": trained[keep],
        "loss": loss.item(),
        "gradient": gradient / dist.get_world_size(),
    }


def on_a_rank(folder: str) -> None:
    import torch.distributed as dist
    import verl.trainer.ppo.core_algos  # noqa: F401 (losses and their fields)
    from verl.utils.distributed import initialize_global_process_group_ray

    from verl.workers.engine.prefix_tree.micro_batches import rows_and_temperatures
    from verl.workers.engine.prefix_tree.trie import build_trie, distinct_tokens

    initialize_global_process_group_ray()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        write_model(folder)
    dist.barrier()
    rows = [prompt + response for prompt, response in zip(*mini_batch(rank), strict=True)]
    results: dict = {"tokens": sum(map(len, rows)), "unique_tokens": len(build_trie(rows))}
    for name, changes in (CASES | {"skip_" + name: case for name, case in SKIPPING.items()}).items():
        case = CASE | changes
        results[name] = {}
        for update, use_prefix_tree in (("rows", False), ("tree", True)):
            torch.manual_seed(0)  # LoRA's matrices
            engine, actor = make_engine(folder, case, use_prefix_tree)
            results[name][update] = run(engine, actor, make_data(rank, ranks, case))
    contexts = contexts_of(rank)
    for name, changes in WITH_CONTEXTS.items():
        case = CASE | changes
        engine, actor = make_engine(folder, case, use_prefix_tree=True)
        plain = run(engine, actor, make_data(rank, ranks, case))["gradient"]
        engine, actor = make_engine(folder, case, use_prefix_tree=True)
        data = with_contexts(make_data(rank, ranks, case), contexts)
        if name == "vanilla":
            sequences = [sequence for row in rows_and_temperatures(data)[0] for sequence in row.tokens]
            results["distinct_tokens"] = distinct_tokens(sequences)
        slow = token_by_token(folder, actor, data.clone(), contexts, case)
        tree = run(engine, actor, data)
        difference = float((tree["gradient"] - plain).norm() / plain.norm())
        results["contexts_" + name] = {"slow": slow, "tree": tree, "without_contexts": difference}
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    on_a_rank(sys.argv[1])
