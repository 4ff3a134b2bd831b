"""Tensor code of this project under torch's `FakeTensorMode`, as if on a GPU: wrong devices and dtypes, and waits.

The mode computes devices, dtypes and shapes of tensors without values, and needs no driver. An operation on tensors of
two devices, or of dtypes that do not fit, raises an error here as on a GPU. What makes the CPU wait for the GPU (a read
of a value, or a copy from or to the GPU) is noted by the function that does it, and compared with WAITS.

What this cannot see: values, and so NaN, indices out of range and branches that values decide (each number that is read
is 1, and a mask chooses everything); dtypes inside a function; backward passes by autograd, which asks the driver for a
context, so that only the project's own two are called, by hand; the kernels of Triton and vLLM; memory and speed; more
than one GPU; waits within upstream's functions, which are not noted. The trainer computes fields on the CPU: here they
show that they would also work on a GPU.

torch's CPU build knows no CUDA device, so these tests run with the versions of the extra `gpu` (scripts/test.sh).
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_leaves
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.tensordict_utils import assign_non_tensor
from verl.utils.torch_functional import entropy_from_logits

import verl
from tests.configs import composed
from tests.workers.engine.tries import tiny_model
from verl.trainer.ppo.v1.component import components_of
from verl.trainer.ppo.v1.explore_trainer import compute_fields
from verl.utils.parts import computed_fields, parts
from verl.utils.token_fields import FIELDS, REFERENCE_LOG_PROB
from verl.workers.config.prefix_tree import MODEL_TYPES
from verl.workers.engine.prefix_tree.attention import NAME, GatherNodes
from verl.workers.engine.prefix_tree.log_probs import _ChosenLogProbs, tree_log_probs
from verl.workers.rollout.engines.local_transformers import TransformersEngine
from vllm_patches.entropy_temperature import compute_entropy_based_temperature, entropy_of_logits
from vllm_patches.tempered_requests import KEY, SETTINGS

pytestmark = pytest.mark.skipif(not torch.version.cuda, reason="torch's CPU build: see scripts/test.sh --gpu-versions")

aten = torch.ops.aten
ROOT = Path(__file__).resolve().parents[1]
OURS = tuple(f"{ROOT / package}/" for package in ("recipe", "verl", "verl_patches", "vllm_patches"))
UPSTREAM = next((path for path in verl.__path__ if "site-packages" in path), "") + "/"

READS, CHOOSES, DOWN, UP = "reads a number", "counts what a mask chooses", "copies to the CPU", "copies to the GPU"
RANKS = {("token_losses.entropy_rank", how) for how in (DOWN, UP)}
TRIE = {("log_probs.__init__", UP), ("attention.__init__", UP)}
# computation -> the functions (module and name) that wait for the GPU, and how
WAITS = {
    # one read for all metrics of a micro-batch
    "loss=hapo": {("token_losses.token_means", READS)},
    "loss=archer": {("token_losses.token_means", READS)},
    "loss=aspo": {("token_losses.token_means", READS)},
    "loss=aepo": {("loss.compute_policy_loss_aepo", READS)},
    # once a step, and of tensors that are on the CPU
    "fields of loss=hapo": {
        *(("normalized_entropy.compute_entropy_h", how) for how in (DOWN, UP)),
        ("component.token_fields", READS),
    },
    "fields of loss=archer": RANKS,
    "fields of loss=aspo": RANKS,
    "fields of loss=aepo": {("loss.standardize_entropy", READS)},
    "fields of loss=forking": {("loss.forking_weights", how) for how in (DOWN, CHOOSES)}
    | {("component.token_fields", READS)},
    "fields of credit=edge": {("credit.entropy_factors", how) for how in (CHOOSES, READS)},
    # a trie is built on the CPU
    "tree": TRIE | {("log_probs.tree_log_probs", DOWN)},
    "engine": TRIE | {("micro_batches._cells", DOWN), ("micro_batches.rows_and_temperatures", READS)},
    "gradients": {("log_probs.backward", READS)},  # where each chunk of logits begins
    "score": {("local_transformers.score", how) for how in (UP, READS)},
}


class FakeCuda(FakeTensorMode):
    """A mode in which `device="cuda"` needs no GPU. `waits` are the project's functions that wait for it, and how."""

    def __init__(self):
        super().__init__(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True)
        self.waits: set[tuple[str, str]] = set()

    def dispatch(self, func, types, args=(), kwargs=None):
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        if func is aten._local_scalar_dense.default:
            self._note(READS, tensors[0].is_cuda)
            return 1.0 if tensors[0].dtype.is_floating_point else 1
        if func is aten.nonzero.default:
            self._note(CHOOSES, tensors[0].is_cuda)
            shape = [tensors[0].numel(), tensors[0].dim()]
            return super().dispatch(aten.new_zeros.default, types, (tensors[0], shape), {"dtype": torch.long})
        result = super().dispatch(func, types, args, kwargs)
        if func in (aten._to_copy.default, aten.copy_.default) and not (kwargs or {}).get("non_blocking"):
            self._note(UP if result.is_cuda else DOWN, result.is_cuda != tensors[-1].is_cuda)
        return result

    def _note(self, how: str, waits: bool) -> None:
        """Note the innermost function of the project, unless one of upstream's asks for it."""
        frame = sys._getframe() if waits else None
        while frame and not frame.f_code.co_filename.startswith(UPSTREAM):
            if frame.f_code.co_filename.startswith(OURS) and not frame.f_code.co_name.startswith("<"):
                self.waits.add((f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}", how))
                return
            frame = frame.f_back


@pytest.fixture
def gpu(monkeypatch) -> Iterator[FakeCuda]:
    of_values = torch.Tensor.numpy

    def ones(tensor: torch.Tensor) -> np.ndarray:
        if not isinstance(tensor, FakeTensor):
            return of_values(tensor)
        assert not tensor.is_cuda, "numpy() of a tensor on a GPU"
        return np.ones(tensor.shape, str(tensor.dtype).removeprefix("torch."))

    monkeypatch.setattr(torch.Tensor, "numpy", ones)
    with FakeCuda() as mode:
        yield mode


def ones(*shape: int, **options) -> torch.Tensor:
    return torch.ones(shape or (4, 9), device="cuda", **options)


config_of = partial(composed, "explore", "hardware=cpu")


def assert_on_gpu(*tensors: torch.Tensor) -> None:
    assert {(tensor.device.type, tensor.dtype) for tensor in tensors} == {("cuda", torch.float32)}


@pytest.mark.parametrize("loss", [name for name, part in parts("loss").items() if not part.alias])
def test_losses(gpu, loss):
    actor = config_of(f"loss={loss}").actor_rollout_ref.actor
    config, mask = omega_conf_to_dataclass(actor), ones(dtype=torch.long)
    config.global_batch_info.update(dp_size=1, batch_num_tokens=30, global_batch_size=4)
    with ExitStack() as stack:
        for field in (*parts("loss")[loss].fields(actor), REFERENCE_LOG_PROB):
            stack.enter_context(field.bound(ones()))
        compute = get_policy_loss_fn(loss)
        value, _ = compute(ones(), ones(requires_grad=True), ones(), mask, config.loss_agg_mode, config, ones())
    assert_on_gpu(value)
    assert value.requires_grad
    assert gpu.waits == WAITS.get(f"loss={loss}", set())


WITH_FIELDS = [
    *(f"loss={name}" for name, part in parts("loss").items() if not part.alias and (part.needs or part.switches)),
    *(f"credit={name}" for name, part in parts("credit").items() if any(need.unsent is None for need in part.needs)),
]


@pytest.mark.parametrize("choice", WITH_FIELDS)
def test_fields(gpu, choice):
    config = config_of(choice)
    fields = compute_fields(computed_fields(config), components_of(config), ones(), ones(dtype=torch.bool), {})
    assert_on_gpu(*fields.values())
    assert gpu.waits == WAITS.get(f"fields of {choice}", set())


def test_no_field_is_left_out():
    needed = {field.name for choice in WITH_FIELDS for field in computed_fields(config_of(choice))}
    assert needed == {name for name, field in FIELDS.items() if field.unsent is None}


def model_on_gpu(kind: str, dtype: torch.dtype) -> torch.nn.Module:
    with unset_fake_temporarily():
        model = tiny_model(kind, dtype)
    for module in list(model.modules()):  # torch cannot move a whole model into this mode
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, torch.nn.Parameter(parameter.detach().cuda()))
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.cuda())
    return model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", MODEL_TYPES)
def test_the_prefix_trees_forward(gpu, kind, dtype):
    """The forward uses the varlen kernel in bfloat16, and padded segments in float32."""
    model = model_on_gpu(kind, dtype)
    log_probs, entropies = tree_log_probs(model, [ones(n, dtype=torch.long) for n in (3, 5, 5)], [1.0, 0.7, 0.7])
    assert_on_gpu(*log_probs, *entropies)
    assert gpu.waits == WAITS["tree"]


def test_the_engines_inputs_and_outputs(gpu):
    from verl_patches.prefix_tree_engine import PrefixTreeEngine

    settings = SimpleNamespace(entropy_from_logits_with_chunking=False, entropy_checkpointing=False)
    engine = SimpleNamespace(_nodes=0, _tokens=0, engine_config=settings)
    engine.compute_entropy_from_logits = entropy_from_logits
    engine._node_entropies = partial(PrefixTreeEngine._node_entropies, engine)
    model = model_on_gpu("qwen2", torch.bfloat16)
    model.set_attn_implementation(NAME)
    ids = torch.nested.nested_tensor_from_jagged(ones(8, dtype=torch.long), ones(3, dtype=torch.long))
    columns = {"input_ids": ids, "position_ids": ids, "temperature": ones(2)}
    data = TensorDict(columns, batch_size=[2])
    assign_non_tensor(data, calculate_entropy=True)
    inputs, arguments = PrefixTreeEngine.prepare_model_inputs(engine, data)
    outputs = PrefixTreeEngine.prepare_model_outputs(engine, model(**inputs, use_cache=False), arguments, data, None)
    assert outputs["entropy"].is_cuda
    assert_on_gpu(outputs["log_probs"])
    assert gpu.waits == WAITS["engine"]


@pytest.mark.parametrize("function", [GatherNodes, _ChosenLogProbs])
def test_gradients(gpu, function):
    """Forward and backward pass of each autograd function of the project, without autograd."""
    inputs, places = ones(dtype=torch.bfloat16), [ones(5, dtype=torch.long)] * (2 if function is _ChosenLogProbs else 1)
    ctx = SimpleNamespace()
    ctx.save_for_backward = lambda *tensors: setattr(ctx, "saved_tensors", tensors)
    with torch.no_grad():
        gradient, *others = function.backward(ctx, function.forward(ctx, inputs, *places))
    assert (gradient.shape, gradient.dtype, gradient.device) == (inputs.shape, inputs.dtype, inputs.device)
    assert others == [None] * len(places)
    assert gpu.waits == (WAITS["gradients"] if function is _ChosenLogProbs else set())


@pytest.mark.parametrize("settings", [partial(ones, 4), lambda: 0.5], ids=["of_each_row", "numbers"])
def test_the_adaptive_temperature(gpu, settings):
    factors = compute_entropy_based_temperature(ones(dtype=torch.bfloat16), **{name: settings() for name in SETTINGS})
    assert_on_gpu(factors, entropy_of_logits(ones(dtype=torch.bfloat16)))
    assert gpu.waits == set()


@pytest.mark.parametrize("opted_in", [2, 4])
def test_the_logits_processor(gpu, opted_in):
    from vllm import SamplingParams
    from vllm.v1.sample.logits_processor import BatchUpdate

    from vllm_patches.v1_adaptive_temperature import AdaptiveTemperature

    params = SamplingParams(extra_args={KEY: dict.fromkeys(SETTINGS, 0.5)})
    processor, logits = AdaptiveTemperature(None, torch.device("cuda"), False), ones()
    processor.update_state(BatchUpdate(4, [], [(i, params, [1], []) for i in range(opted_in)], []))
    assert processor.apply(logits) is logits
    assert gpu.waits == set()


async def test_scores(gpu):
    model = model_on_gpu("qwen2", torch.bfloat16)
    assert len(await TransformersEngine(model).score([1, 2], [3, 4, 5])) == 3
    assert gpu.waits == WAITS["score"]
