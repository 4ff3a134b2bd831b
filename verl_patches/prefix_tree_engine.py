"""An FSDP engine, derived from upstream's, whose forward takes a micro-batch's trie instead of its rows.

It overrides only the conversions from a micro-batch to the model's inputs, and from logits to a row's values. Losses
and later code see upstream's rows: entry i of a row holds log p of token i + 1 and the entropy of the logits at i.
"""

import torch
from tensordict import TensorDict
from torch.utils.checkpoint import checkpoint
from verl.utils.model import extract_multi_modal_inputs
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from verl.utils import tensordict_utils as tu
from verl.workers.config.prefix_tree import (
    SKIP_ZERO_ADVANTAGES,
    STRATEGIES,
    TRAINED_TOKEN_SHARE,
    UNIQUE_TOKEN_SHARE,
    check_model_config,
)
from verl.workers.engine import EngineRegistry
from verl.workers.engine.prefix_tree.attention import NAME
from verl.workers.engine.prefix_tree.log_probs import TrieBatch
from verl.workers.engine.prefix_tree.micro_batches import (
    TOKEN_BYTES,
    TokenBytes,
    prepare_micro_batches,
    rows_and_temperatures,
)

# entry of a mini-batch; if true, this engine cuts it into micro-batches
MARK = "in_prefix_trees"
UNSUPPORTED = ("use_fused_kernels", "calculate_sum_pi_squared", "distillation_use_topk")


@EngineRegistry.register(model_type="language_model", backend=list(STRATEGIES.values()), device=["cuda", "npu"])
class PrefixTreeEngine(FSDPEngineWithLMHead):
    """The engine of `use_prefix_tree=true`, registered under its own names because upstream's are taken."""

    # numbers of tokens of the present mini-batch: in its tries, and in the sequences of these tries
    _nodes = _tokens = 0

    def __init__(self, model_config, engine_config, optimizer_config, checkpoint_config):
        upstream = {own: name for name, own in STRATEGIES.items()}
        # the config is frozen; upstream itself sets the strategy in this way
        object.__setattr__(engine_config, "strategy", upstream.get(engine_config.strategy, engine_config.strategy))
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config)

    def _build_module(self):
        module = super()._build_module()
        check_model_config(module.config.to_dict())
        module.set_attn_implementation(NAME)
        return module

    def forward_backward_batch(self, data: TensorDict, loss_function, forward_only=False):
        tu.assign_non_tensor(data, **{MARK: True})
        if torch.cuda.is_available():  # the bytes are those of its kernels
            model = self.model_config
            token_bytes = TokenBytes.of(model.hf_config, model.enable_gradient_checkpointing)
            tu.assign_non_tensor(data, **{TOKEN_BYTES: token_bytes})
        if forward_only or tu.get_non_tensor_data(data=data, key="return_model_output", default=False):
            tu.assign_non_tensor(data, **{SKIP_ZERO_ADVANTAGES: False})  # the outputs of all rows are needed
        self._nodes = self._tokens = 0
        output = super().forward_backward_batch(data, loss_function, forward_only)
        if not forward_only:
            output["metrics"][TRAINED_TOKEN_SHARE] = [self._tokens / data["input_ids"].values().numel()]
            output["metrics"][UNIQUE_TOKEN_SHARE] = [self._nodes / self._tokens]
        return output

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[dict, dict]:
        """Return the model's keyword arguments for the trie of the nested `input_ids`, and the trie."""
        for key in UNSUPPORTED:
            if tu.get_non_tensor_data(data=micro_batch, key=key, default=False):
                raise ValueError(f"use_prefix_tree: {key} is not supported")
        pictures = extract_multi_modal_inputs(micro_batch.get("multi_modal_inputs", []))
        if pictures or micro_batch["position_ids"].dim() == 3:
            raise ValueError("use_prefix_tree: multimodal inputs and 3-D positions are not supported")
        batch = TrieBatch(*rows_and_temperatures(micro_batch), micro_batch["input_ids"].device)
        self._nodes, self._tokens = self._nodes + len(batch.trie), self._tokens + batch.n_tokens
        return batch.model_inputs, {"trie_batch": batch}

    def prepare_model_outputs(self, output, output_args, micro_batch: TensorDict, logits_processor_func) -> dict:
        """Return `log_probs` and, if the batch sets `calculate_entropy`, `entropy`. Both are nested tensors with the
        rows of `input_ids`; a row's last log-probability is 0."""
        batch: TrieBatch = output_args["trie_batch"]
        offsets = micro_batch["input_ids"].offsets()
        logits = batch.scale(output.logits.squeeze(0))
        values = {"log_probs": batch.node_log_probs(logits)[batch.next_nodes]}
        if tu.get_non_tensor_data(data=micro_batch, key="calculate_entropy", default=False):
            values["entropy"] = self._node_entropies(logits)[batch.own_nodes]
        return {name: torch.nested.nested_tensor_from_jagged(jagged, offsets) for name, jagged in values.items()}

    def _node_entropies(self, logits: torch.Tensor) -> torch.Tensor:
        """Return entropies (N,) in nats by upstream's function, chunked and recomputed as the config says."""
        config, options = self.engine_config, {}
        if config.entropy_from_logits_with_chunking:
            options["chunk_size"] = config.entropy_from_logits_chunk_size
        if config.entropy_checkpointing:
            return checkpoint(self.compute_entropy_from_logits, logits, use_reentrant=False, **options)
        return self.compute_entropy_from_logits(logits, **options)


def cut_by_prefix_trees(module=transformer_impl) -> None:
    """Cut the mini-batches of `PrefixTreeEngine` with `micro_batches.prepare_micro_batches` (verl 0.9.1).

    The engine marks them by the entry `MARK`. Upstream's `forward_backward_batch` calls a function of its module, which
    a subclass cannot replace without copying the method. Other mini-batches are cut by upstream's function as before.
    This can go when the engine has a method for it.
    """
    upstreams = module.prepare_micro_batches

    def prepare(data: TensorDict, dp_group=None, **kwargs):
        if tu.get_non_tensor_data(data=data, key=MARK, default=False):
            return prepare_micro_batches(data, dp_group)
        return upstreams(data=data, dp_group=dp_group, **kwargs)

    module.prepare_micro_batches = prepare


cut_by_prefix_trees()
