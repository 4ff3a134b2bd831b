"""A mini-batch's forward and backward in upstream's FSDP2 engine, by rows or by their prefix tree: ten rows in two
groups, and a tiny model."""

import random
from pathlib import Path

import torch

CASE = {"loss": "vanilla", "loss_agg_mode": "token-mean", "loss_scale_factor": None}
CASE |= {"entropy_chunks": False, "temperatures": (0.9,), "max_tokens": 10_000, "checkpointing": False, "dtype": "fp32"}
CASE |= {"lora_rank": 0, "skip": False}
# rows that keep their advantages on each rank, in the case `skip`
TRAINED = ([0, 3, 5], [7])


def mini_batch(rank: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return ten prompts and ten responses as token lists: two groups of five, drawn with `rank` as the seed. All
    prompts begin with the same six tokens. A group's responses are three that agree (two equal ones and their first
    three tokens) and two that fork off them after five tokens."""
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
    """Return a rank's mini-batch as verl's tensordict, with random log-probs and advantages; `case` is like CASE."""
    from verl.utils import tensordict_utils as tu
    from verl.utils.token_fields import FIELDS
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
        "advantages": noise(),
        **{name: noise(0.3) for name in FIELDS},
    }
    if case["skip"]:
        kept = [row if i in TRAINED[rank] else 0 * row for i, row in enumerate(fields["advantages"].unbind())]
        fields["advantages"] = nested(kept)
    temperatures = case["temperatures"]
    if len(temperatures) > 1:  # rows alternate, so that each group has both temperatures
        fields["temperature"] = torch.tensor([temperatures[row % len(temperatures)] for row in range(len(sequences))])
    settings = {"use_dynamic_bsz": True, "max_token_len_per_gpu": case["max_tokens"], "use_remove_padding": False}
    settings |= {"global_batch_size": ranks * len(sequences), "calculate_entropy": True, "return_model_output": True}
    if case["skip"]:
        settings |= {"calculate_entropy": False, "return_model_output": False, SKIP_ZERO_ADVANTAGES: True}
    settings |= {} if "temperature" in fields else {"temperature": temperatures[0]}
    return tu.get_tensordict(fields, settings)


def make_engine(folder: str, case: dict, use_prefix_tree: bool):
    """Return an engine and the actor's config, made as upstream's worker makes them; `case` is like CASE."""
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
    """Return the data's log-probs, entropies, loss, metrics and flat gradient, and the tokens of each forward pass."""
    from functools import partial

    from verl.utils.token_fields import FIELDS
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
    """Return the values (tokens,) of the concatenated rows without each row's last one, which must only be finite."""
    assert values.isfinite().all()
    keep = torch.ones(len(values), dtype=torch.bool)
    keep[data["input_ids"].offsets()[1:] - 1] = False
    return values[keep].float()


def write_model(folder: str | Path) -> None:
    """Write a tiny Qwen2 to folder/model. Its random weights are scaled up, so that its predictions are not uniform."""
    from recipe.common.tiny_model import TinyModelConfig, make_model, make_tokenizer

    tokenizer = make_tokenizer()
    config = TinyModelConfig(hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2)
    model = make_model(config, tokenizer)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(12)
    model.save_pretrained(f"{folder}/model")
    tokenizer.save_pretrained(f"{folder}/model")
