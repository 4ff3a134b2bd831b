"""The worker's meta-learning on two real FSDP2 ranks (gloo): the weights move as the formulas say.

The worker is upstream's with a tiny Qwen2, an AdamW and a loss of the test's own; only the rollout is left out. The two
ranks are processes (about a minute on two cores).
"""

import os
import sys

import pytest
import torch

pytestmark = pytest.mark.slow

LR, INNER_LR, META_LR = 1e-3, 0.5, 0.25


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    from tests.forked import torchrun  # the ranks have no tests

    folder = tmp_path_factory.mktemp("meta")
    done = torchrun(2, __file__, str(folder))
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(folder / "results.pt")


def close(actual: dict, expected: dict) -> None:
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-5, atol=1e-6)


def test_reptile_interpolates(results):
    start, inner, end = (results[f"reptile_{when}"] for when in ("start", "inner", "end"))
    assert max((inner[name] - start[name]).abs().max() for name in start) > 1e-4
    close(end, {name: start[name] + META_LR * (inner[name] - start[name]) for name in start})
    once = [name for name in start if name != "lm_head.weight"]  # the embeddings', under a second name
    distance = sum((inner[name] - start[name]).square().sum() for name in once).sqrt()
    assert results["reptile_metrics"]["meta/inner_distance"] == pytest.approx(distance.item(), rel=1e-4)


def test_maml_steps_from_the_start_with_the_adapted_gradient(results):
    """Against AdamW written out, its gradient taken by autograd on the whole, unsharded model."""
    start, gradients = results["maml_start"], results["maml_expected_gradients"]
    norm = sum(gradients[name].square().sum() for name in gradients).sqrt()
    assert results["maml_metrics"]["meta/grad_norm"] == pytest.approx(norm.item(), rel=1e-3)
    close(results["maml_inner"], results["maml_expected_inner"])
    for name in gradients:  # the first step of Adam's: the gradient over its own size
        moved = results["maml_end"][name] - start[name]
        clipped = gradients[name] * min(1.0, 1.0 / norm.item())
        sure = clipped.abs() > 1e-5  # elsewhere Adam divides by next to nothing
        torch.testing.assert_close(moved[sure], -LR * clipped.sign()[sure], rtol=2e-2, atol=1e-7)


def test_the_weights_that_rollouts_get_are_the_moved_ones(results):
    close(results["maml_end"], results["parameters"])


def test_ray_worker_groups_find_the_methods():
    from verl.single_controller.base.decorator import MAGIC_ATTR

    from recipe.hato.meta_workers import MetaActorWorker

    for name in ("meta_begin", "meta_query", "meta_end", "update_actor"):
        assert hasattr(getattr(MetaActorWorker, name), MAGIC_ATTR), name


def test_calls_out_of_order(monkeypatch):
    from omegaconf import OmegaConf

    from recipe.hato.meta_workers import MetaActorWorker

    for name, value in {"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    worker = MetaActorWorker(OmegaConf.create({"actor": {"strategy": "fsdp2"}}), role="actor")
    for call in (worker.meta_query, worker.meta_end):
        with pytest.raises(RuntimeError, match="no episode is open"):
            call()
    worker.episode = object()
    with pytest.raises(RuntimeError, match="meta_begin within an episode"):
        worker.meta_begin(method="maml")


# ---- on a rank ----


def make_worker(folder: str):
    from omegaconf import OmegaConf
    from verl.workers.engine_workers import TrainingWorker

    from recipe.hato.meta_workers import MetaActorWorker
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig

    class ActorOnly(MetaActorWorker):
        """A worker whose `init_model` makes the actor alone; upstream's also needs a rollout's configuration."""

        def init_model(self):
            fsdp = {"strategy": "fsdp2", "model_dtype": "fp32", "dtype": "float32", "use_torch_compile": False}
            fsdp["mixed_precision"] = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
            config = TrainingWorkerConfig(
                model_type="language_model",
                model_config=HFModelConfig(
                    path=f"{folder}/model",
                    use_remove_padding=False,
                    enable_gradient_checkpointing=False,
                    override_config={"attn_implementation": "sdpa"},
                ),
                engine_config=FSDPEngineConfig(**fsdp),
                optimizer_config=FSDPOptimizerConfig(lr=LR, weight_decay=0.0, total_training_steps=10),
            )
            self.actor = TrainingWorker(config=config)
            self.actor.reset()

    worker = ActorOnly(OmegaConf.create({"actor": {"strategy": "fsdp2"}}), role="actor")
    worker.init_model()
    return worker


def loss_on(module, tokens: torch.Tensor) -> torch.Tensor:
    log_probs = module(tokens).logits[:, :-1].log_softmax(-1)
    return -log_probs.gather(-1, tokens[:, 1:, None]).mean()


def tokens_of(batch: int, rank: int | None = None) -> torch.Tensor:
    """(4, 8), of which each rank sees two rows."""
    whole = torch.randint(100, (4, 8), generator=torch.Generator().manual_seed(batch))
    return whole if rank is None else whole[2 * rank : 2 * rank + 2]


def update(worker, batch: int) -> None:
    engine = worker.actor.engine
    with engine.train_mode():
        engine.optimizer_zero_grad()
        loss_on(engine.module, tokens_of(batch, worker.rank)).backward()
        engine.optimizer_step()


def whole_weights(worker) -> dict[str, torch.Tensor]:
    """Return a copy of the weights as the rollout engines receive them."""
    weights, _ = worker.actor.engine.get_per_tensor_param()
    return {name: weight.detach().clone() for name, weight in weights}


def reptile(worker, results: dict) -> None:
    results["reptile_start"] = whole_weights(worker)
    worker.meta_begin(method="reptile", meta_lr=META_LR)
    update(worker, 1)
    update(worker, 2)
    results["reptile_inner"] = whole_weights(worker)
    results["reptile_metrics"] = worker.meta_end()
    results["reptile_end"] = whole_weights(worker)


def maml(worker, results: dict, folder: str) -> None:
    from transformers import AutoModelForCausalLM

    worker.actor.engine.optimizer.state.clear()
    results["maml_start"] = whole_weights(worker)
    model = AutoModelForCausalLM.from_pretrained(f"{folder}/model", dtype=torch.float32)
    model.load_state_dict(results["maml_start"], strict=False)
    loss_on(model, tokens_of(3)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.optim.SGD(model.parameters(), lr=INNER_LR).step()
    results["maml_expected_inner"] = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.zero_grad()
    loss_on(model, tokens_of(4)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    results["maml_expected_gradients"] = {name: p.grad for name, p in model.named_parameters()}

    worker.meta_begin(method="maml", inner_lr=INNER_LR)
    update(worker, 3)
    results["maml_inner"] = whole_weights(worker)
    worker.meta_query()
    update(worker, 4)
    results["maml_metrics"] = worker.meta_end()
    results["maml_end"] = whole_weights(worker)
    named = worker.actor.engine.module.named_parameters()
    results["parameters"] = {name: p.full_tensor().detach().clone() for name, p in named}


def on_a_rank(folder: str) -> None:
    import torch.distributed as dist

    from recipe.common.tiny_model import TinyModelConfig, make_model, make_tokenizer

    if os.environ["RANK"] == "0":
        tokenizer = make_tokenizer()
        model = make_model(TinyModelConfig(hidden_size=24, intermediate_size=32, num_layers=2), tokenizer)
        model.save_pretrained(f"{folder}/model")
        tokenizer.save_pretrained(f"{folder}/model")
    from verl.utils.distributed import initialize_global_process_group_ray

    initialize_global_process_group_ray()
    dist.barrier()
    results: dict = {}
    worker = make_worker(folder)
    reptile(worker, results)
    maml(worker, results, folder)
    if dist.get_rank() == 0:
        torch.save(results, f"{folder}/results.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    on_a_rank(sys.argv[1])
