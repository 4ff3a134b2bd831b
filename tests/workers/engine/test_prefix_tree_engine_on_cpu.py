"""The engine with and without prefix tree on one and on two FSDP2 ranks (gloo): the same values, losses and gradients.

The ranks are processes with upstream's engine, a tiny Qwen2 and a mini-batch of two groups each.
"""

import random
import sys

import pytest
import torch

pytestmark = pytest.mark.slow

# name -> what differs from CASE
CASES = {
    "vanilla": {},
    "hapo": {"loss": "hapo", "loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 7},
    "aepo": {"loss": "aepo", "entropy_chunks": True, "temperatures": (1.0, 0.6)},
    "micro_batches": {"max_tokens": 35},
    "recomputed": {"checkpointing": True, "loss_agg_mode": "seq-mean-token-mean"},
    "lora": {"lora_rank": 4},
    "bf16": {"dtype": "bf16"},
}
CASE = {"loss": "vanilla", "loss_agg_mode": "token-mean", "loss_scale_factor": None}
CASE |= {"entropy_chunks": False, "temperatures": (0.9,), "max_tokens": 10_000, "checkpointing": False, "dtype": "fp32"}
CASE |= {"lora_rank": 0, "skip": False}
# losses of which rows without advantages are left out: all but three of both groups on rank 0, all but one on rank 1
SKIPPING = {name: {"loss": name, "skip": True, "max_tokens": 25} for name in ("vanilla", "hapo", "aepo")}
SKIPPING["hapo"]["loss_agg_mode"] = "seq-mean-token-sum"
TRAINED = ([0, 3, 5], [7])


@pytest.fixture(scope="module", params=[1, 2], ids=["one_rank", "two_ranks"])
def results(request, tmp_path_factory):
    from tests.forked import torchrun  # the ranks have no tests

    folder = tmp_path_factory.mktemp("engines")
    done = torchrun(request.param, __file__, str(folder))
    assert done.returncode == 0, done.stderr[-4000:]
    return [torch.load(folder / f"{rank}.pt") for rank in range(request.param)]


@pytest.mark.parametrize("name", [name for name in CASES if name != "bf16"])
def test_as_rows(results, name):
    for of_rank in results:
        rows, tree = of_rank[name]["rows"], of_rank[name]["tree"]
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


def test_bfloat16_is_as_good_as_rows(results):
    for of_rank in results:
        exact = of_rank["vanilla"]["rows"]["log_probs"]
        error_of_rows, error_of_tree = (
            (of_rank["bf16"][x]["log_probs"] - exact).abs().mean() for x in ("rows", "tree")
        )
        assert 0 < error_of_tree <= 1.5 * error_of_rows


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


def test_the_engines_are_those_of_the_switch(results):
    assert results[0]["vanilla"]["rows"]["engine"] == "FSDPEngineWithLMHead"
    assert results[0]["vanilla"]["tree"]["engine"] == "PrefixTreeEngine"


# ---- on a rank ----


def mini_batch(rank: int) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and responses: two groups of five that share a system text; duplicates and a response in another."""
    rng = random.Random(rank)
    system = [rng.randrange(90) for _ in range(6)]
    prompts, responses = [], []
    for _ in range(2):
        prompt = system + [rng.randrange(90) for _ in range(5)]
        stem = [rng.randrange(90) for _ in range(8)]
        forks = [stem[:5] + [rng.randrange(90) for _ in range(rng.randint(1, 6))] for _ in range(2)]
        prompts += [prompt] * 5
        responses += [stem, stem, stem[:3], *forks]
    return prompts, responses


def make_data(rank: int, ranks: int, case: dict):
    from verl.trainer.ppo.token_fields import FIELDS
    from verl.utils import tensordict_utils as tu
    from verl.workers.config.prefix_tree import SKIP_ZERO_ADVANTAGES

    prompts, responses = mini_batch(rank)
    generator = torch.Generator().manual_seed(rank)

    def nested(rows):
        return torch.nested.as_nested_tensor([torch.as_tensor(row) for row in rows], layout=torch.jagged)

    def noise(scale: float = 1.0, shift: float = 0.0):
        return nested([scale * torch.randn(len(row), generator=generator) + shift for row in responses])

    sequences = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
    fields = {
        "input_ids": nested(sequences),
        "position_ids": nested([torch.arange(len(row)) for row in sequences]),
        "loss_mask": nested([[0] * len(p) + [1] * len(r) for p, r in zip(prompts, responses, strict=True)]),
        "prompts": nested(prompts),
        "responses": nested(responses),
        "response_mask": nested([[1] * len(row) for row in responses]),
        "old_log_probs": noise(0.3, -4.5),
        "ref_log_prob": noise(0.3, -4.5),
        "advantages": noise(),  # of every row
        **{name: noise(0.3) for name in FIELDS},
    }
    if case["skip"]:
        kept = [row if i in TRAINED[rank] else 0 * row for i, row in enumerate(fields["advantages"].unbind())]
        fields["advantages"] = nested(kept)
    temperatures = case["temperatures"]
    if len(temperatures) > 1:  # of each row; a group has both
        fields["temperature"] = torch.tensor([temperatures[row % len(temperatures)] for row in range(len(sequences))])
    settings = {"use_dynamic_bsz": True, "max_token_len_per_gpu": case["max_tokens"], "use_remove_padding": False}
    settings |= {"global_batch_size": ranks * len(sequences), "calculate_entropy": True, "return_model_output": True}
    if case["skip"]:
        settings |= {"calculate_entropy": False, "return_model_output": False, SKIP_ZERO_ADVANTAGES: True}
    settings |= {} if "temperature" in fields else {"temperature": temperatures[0]}
    return tu.get_tensordict(fields, settings)


def make_engine(folder: str, case: dict, use_prefix_tree: bool):
    """An engine and the actor's config, as upstream's worker makes them."""
    from verl.workers.config.actor import PolicyLossConfig

    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.config.explore import ExploreActorConfig
    from verl.workers.engine import EngineRegistry

    loss = case["loss"]
    precision = dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), case["dtype"])
    chunks = {"entropy_from_logits_with_chunking": case["entropy_chunks"], "entropy_from_logits_chunk_size": 16}
    fsdp = FSDPEngineConfig(
        model_dtype="fp32",
        mixed_precision=precision,
        use_torch_compile=False,
        entropy_checkpointing=case["checkpointing"],
        **chunks,
    )
    actor = ExploreActorConfig(
        strategy="fsdp2",
        fsdp_config=fsdp,
        use_prefix_tree=use_prefix_tree,
        rollout_n=5,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=PolicyLossConfig(loss_mode=loss),
        loss_agg_mode=case["loss_agg_mode"],
        loss_scale_factor=case["loss_scale_factor"],
        entropy_coeff=0.0 if case["skip"] else 0.05,
        use_kl_loss=not case["skip"],
        kl_loss_coef=0.1,
        adaptive_clip=loss == "hapo",
        adaptive_advantage=loss == "hapo",
        enable_entropy_balanced_clipping=loss == "aepo",
        enable_entropy_balanced_advantage=loss == "aepo",
    )
    model_config = HFModelConfig(
        path=f"{folder}/model",
        use_remove_padding=False,
        enable_gradient_checkpointing=case["checkpointing"],
        lora_rank=case["lora_rank"],
        override_config={"attn_implementation": "sdpa"},
    )
    engine = EngineRegistry.new(
        model_type="language_model",
        backend=actor.engine.strategy,
        model_config=model_config,
        engine_config=actor.engine,
        optimizer_config=FSDPOptimizerConfig(lr=1e-3, total_training_steps=10),
        checkpoint_config=None,
    )
    engine._build_model_optimizer()
    return engine, actor


def run(engine, actor, data) -> dict:
    from functools import partial

    from verl.trainer.ppo.token_fields import FIELDS
    from verl.workers.utils.field_losses import ppo_loss_with_fields

    tokens = []
    engine.module.lm_head.register_forward_pre_hook(lambda _, inputs: tokens.append(inputs[0].shape[:-1].numel()))
    with engine.eval_mode():
        inferred = engine.infer_batch(data.clone())["model_output"]["log_probs"].values()
    forwards = len(tokens)
    with engine.train_mode():
        engine.optimizer_zero_grad()
        loss_function = partial(ppo_loss_with_fields, config=actor, fields=list(FIELDS))
        output = engine.forward_backward_batch(data, loss_function)
        gradients = [parameter.grad for parameter in engine.module.parameters() if parameter.grad is not None]
    whole = [gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient for gradient in gradients]
    metrics = {
        name: float(values.aggregate() if hasattr(values, "aggregate") else sum(values))
        for name, values in output["metrics"].items()
    }
    returned = output["model_output"]
    values = {"log_probs": predictions(returned["log_probs"].values(), data)} if "log_probs" in returned else {}
    values |= {"entropy": returned["entropy"].values().float()} if "entropy" in returned else {}
    return values | {
        "engine": type(engine).__name__,
        "lm_head_tokens": tokens,
        "trained_tokens": tokens[forwards:],
        "inferred": predictions(inferred, data),
        "loss": sum(output["loss"]),
        "metrics": metrics,
        "gradient": torch.cat([gradient.flatten() for gradient in whole]),
    }


def predictions(values: torch.Tensor, data) -> torch.Tensor:
    """Without the entry of each row's last token, which predicts nothing and only has to be finite."""
    assert values.isfinite().all()
    keep = torch.ones(len(values), dtype=torch.bool)
    keep[data["input_ids"].offsets()[1:] - 1] = False
    return values[keep].float()


def on_a_rank(folder: str) -> None:
    import torch.distributed as dist
    import verl.trainer.ppo.core_algos  # noqa: F401 (losses and their fields)
    from verl.utils.distributed import initialize_global_process_group_ray

    from recipe.common.tiny_model import TinyModelConfig, make_model, make_tokenizer
    from verl.workers.engine.prefix_tree.trie import build_trie

    initialize_global_process_group_ray()
    if dist.get_rank() == 0:
        tokenizer = make_tokenizer()
        config = TinyModelConfig(hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2)
        model = make_model(config, tokenizer)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(12)
        model.save_pretrained(f"{folder}/model")
        tokenizer.save_pretrained(f"{folder}/model")
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
